-- Who may do what. Roles belong to the whole cluster, so this is for an administrator: `walpost init` prints it and does
-- not run it. It may be run again.

-- Applications: write events, and no more. Grant it to the application's own role: GRANT walpost_app TO shop;
DO $walpost$
BEGIN
    CREATE ROLE walpost_app NOLOGIN;
EXCEPTION WHEN duplicate_object THEN
    RAISE NOTICE 'role walpost_app exists already';
END
$walpost$;
GRANT USAGE ON SCHEMA "public" TO walpost_app;
GRANT INSERT ON "public"."outbox" TO walpost_app;

-- walpost itself: reads the write-ahead log. Set its password with ALTER ROLE walpost_relay PASSWORD ... or \password, and
-- allow it in pg_hba.conf for the database by name (the keyword "replication" there does not cover logical replication).
-- On Amazon RDS, where no role can be given REPLICATION: GRANT rds_replication TO walpost_relay;
DO $walpost$
BEGIN
    CREATE ROLE walpost_relay LOGIN REPLICATION;
EXCEPTION WHEN duplicate_object THEN
    RAISE NOTICE 'role walpost_relay exists already';
END
$walpost$;
GRANT USAGE ON SCHEMA "public" TO walpost_relay;
-- SELECT: init counts the rows that are older than the slot. DELETE: retention.
GRANT SELECT, DELETE ON "public"."outbox" TO walpost_relay;
-- What walpost remembers of its deliveries, so that retention knows which rows may go.
GRANT SELECT, INSERT, UPDATE, DELETE ON "public"."walpost_delivered", "public"."walpost_dead_lettered" TO walpost_relay;

-- Table and publication are best created by their owner: run `walpost init` once with the owner's connection string.
-- To let walpost create a publication by itself (auto_create), it must own the table (ALTER TABLE ... OWNER TO
-- walpost_relay) and may create in the database (GRANT CREATE ON DATABASE ... TO walpost_relay).
