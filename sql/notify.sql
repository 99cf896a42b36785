-- Wakes a walpost that polls (poll.notify_channel) at each commit with new events. NOTIFY takes a lock that all notifying
-- transactions of the cluster share while they commit, so they commit one by one: with more than some hundred commits a
-- second a short interval alone is better.

CREATE OR REPLACE FUNCTION "public"."outbox_notify"() RETURNS trigger LANGUAGE plpgsql AS $walpost$
BEGIN
    PERFORM pg_catalog.pg_notify('walpost', '');
    RETURN NULL;
END
$walpost$;

CREATE OR REPLACE TRIGGER "outbox_notify" AFTER INSERT ON "public"."outbox"
    FOR EACH STATEMENT EXECUTE FUNCTION "public"."outbox_notify"();
