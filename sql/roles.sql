-- Who may do what. Roles belong to the whole cluster, so this is for an administrator: `walpost init` prints it and does
-- not run it. It may be run again.

-- Applications: write events, and no more. Grant it to the application's own role: GRANT walpost_app TO shop;
DO $walpost$
BEGIN
    CREATE ROLE walpost_app NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    RAISE NOTICE 'role walpost_app exists already';
END
$walpost$;
GRANT USAGE ON SCHEMA "public" TO walpost_app;
GRANT INSERT ON "public"."outbox" TO walpost_app;
-- outbox_emit runs with its caller's rights, so this gives nobody more than the INSERT above.
DO $walpost$
BEGIN
    GRANT EXECUTE ON FUNCTION "public".outbox_emit(text, text, text, jsonb) TO walpost_app;
    GRANT EXECUTE ON FUNCTION "public".outbox_emit(text, text, json, jsonb) TO walpost_app;
    GRANT EXECUTE ON FUNCTION "public".outbox_emit(text, text, jsonb, jsonb) TO walpost_app;
    GRANT EXECUTE ON FUNCTION "public".outbox_emit(text, text, bytea, jsonb) TO walpost_app;
EXCEPTION WHEN undefined_function THEN
    RAISE NOTICE 'there is no outbox_emit: walpost init creates it where the outbox has the default columns';
END
$walpost$;

-- Consumers: claim events in the inbox, and no more. Grant it to the consumer's own role: GRANT walpost_consumer TO billing;
DO $walpost$
BEGIN
    CREATE ROLE walpost_consumer NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    RAISE NOTICE 'role walpost_consumer exists already';
END
$walpost$;
GRANT USAGE ON SCHEMA "public" TO walpost_consumer;
DO $walpost$
BEGIN
    GRANT INSERT ON "public"."inbox" TO walpost_consumer;
    GRANT EXECUTE ON FUNCTION "public".inbox_claim(text, uuid) TO walpost_consumer;
EXCEPTION WHEN undefined_table OR undefined_function THEN
    RAISE NOTICE 'there is no inbox: walpost init creates it';
END
$walpost$;

-- walpost itself: reads the write-ahead log. Set its password with ALTER ROLE walpost_relay PASSWORD ... or \password, and
-- allow it in pg_hba.conf for the database by name (the keyword "replication" there does not cover logical replication).
-- On Amazon RDS, where no role can be given REPLICATION: GRANT rds_replication TO walpost_relay;
DO $walpost$
BEGIN
    CREATE ROLE walpost_relay LOGIN REPLICATION;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    RAISE NOTICE 'role walpost_relay exists already';
END
$walpost$;
GRANT USAGE ON SCHEMA "public" TO walpost_relay;
-- SELECT: init counts the rows that are older than the slot, and a backfill publishes them. DELETE: retention.
GRANT SELECT, DELETE ON "public"."outbox" TO walpost_relay;
-- The same for inbox_prune, which the inbox's owner may run as well.
DO $walpost$
BEGIN
    GRANT SELECT, DELETE ON "public"."inbox" TO walpost_relay;
    GRANT EXECUTE ON FUNCTION "public".inbox_prune(text, interval, integer) TO walpost_relay;
EXCEPTION WHEN undefined_table OR undefined_function THEN
    RAISE NOTICE 'there is no inbox: walpost init creates it';
END
$walpost$;
-- What walpost remembers of its deliveries, so that retention knows which rows may go.
DO $walpost$
BEGIN
    GRANT SELECT, INSERT, UPDATE, DELETE ON "public"."walpost_delivered", "public"."walpost_dead_lettered" TO walpost_relay;
EXCEPTION WHEN undefined_table THEN
    RAISE NOTICE 'there is no record of deliveries: walpost init creates it';
END
$walpost$;

-- Table and publication are best created by their owner: run `walpost init` once with the owner's connection string.
-- To let walpost create a publication by itself (auto_create), it must own the table (ALTER TABLE ... OWNER TO
-- walpost_relay) and may create in the database (GRANT CREATE ON DATABASE ... TO walpost_relay).
-- Partitions of the outbox are dropped and created by its owner alone (retention.drop_partitions, partitions_ahead):
-- GRANT <the owner of the outbox> TO walpost_relay, and GRANT CREATE ON SCHEMA "public" TO that owner.
