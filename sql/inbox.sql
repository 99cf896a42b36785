-- The inbox: lets a consumer act once on each event, however often the event arrives. Within the transaction of its action the
-- consumer asks inbox_claim; where that says false, the event was dealt with already. Mark and action commit or vanish together.
-- `walpost init` runs this file with the outbox's schema. It may be run again; a table of that name that exists stays as it is.

DO $walpost$
BEGIN
    CREATE TABLE "public"."inbox" (
        consumer   text        NOT NULL,
        event_id   uuid        NOT NULL,
        claimed_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (consumer, event_id)
    );
    -- for inbox_prune, which looks for the oldest marks of a consumer
    CREATE INDEX ON "public"."inbox" (consumer, claimed_at);
    COMMENT ON TABLE "public"."inbox" IS
        'Which events which consumer has dealt with. Written by inbox_claim in the transaction of the consumer''s action.';
    COMMENT ON COLUMN "public"."inbox".consumer IS
        'Who has dealt with it: the consumer group, or another name that all of its instances share.';
    COMMENT ON COLUMN "public"."inbox".event_id IS 'The record header "id".';
    COMMENT ON COLUMN "public"."inbox".claimed_at IS 'When the transaction of the action began. inbox_prune goes by it.';
EXCEPTION WHEN duplicate_table THEN
    RAISE NOTICE 'the table of the inbox exists already and stays as it is';
END
$walpost$;

-- True the first time, false for a repetition, which never aborts the transaction. A second delivery at the same moment waits
-- until the transaction of the first has ended: false when that has committed, true when it was rolled back.
-- That is READ COMMITTED. Under REPEATABLE READ and SERIALIZABLE, a claim of what another transaction has marked since the
-- caller's snapshot is a serialization failure (40001): roll back, begin anew, and the answer is false.
-- The caller needs INSERT on the table and nothing else: the function runs with its rights, and ON CONFLICT without columns
-- reads nothing.
CREATE OR REPLACE FUNCTION "public".inbox_claim(consumer text, event_id uuid)
RETURNS boolean LANGUAGE plpgsql VOLATILE SECURITY INVOKER AS $walpost$
BEGIN
    IF consumer IS NULL OR event_id IS NULL THEN
        RAISE EXCEPTION 'inbox_claim: consumer and event_id must not be null' USING
            ERRCODE = 'null_value_not_allowed',
            HINT = 'Pass the name of the consumer group and the record header "id".';
    END IF;
    INSERT INTO "public"."inbox" (consumer, event_id) VALUES (consumer, event_id) ON CONFLICT DO NOTHING;
    RETURN FOUND;
END
$walpost$;

-- Deletes at most so many marks of a consumer that are older than that, the oldest first, and returns how many they were:
-- call it, each time in a transaction of its own, until it returns less than the batch. A mark must outlive every delivery of
-- its event: keep it for longer than the topic keeps the record. Needs SELECT and DELETE on the table.
CREATE OR REPLACE FUNCTION "public".inbox_prune(consumer text, older_than interval, batch integer DEFAULT 1000)
RETURNS bigint LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $walpost$
DECLARE
    pruned bigint;
BEGIN
    IF consumer IS NULL OR older_than IS NULL OR batch IS NULL OR batch < 1 THEN
        RAISE EXCEPTION 'inbox_prune: consumer and older_than must not be null, and batch must be at least 1' USING
            ERRCODE = 'invalid_parameter_value', HINT = 'For example SELECT inbox_prune(''billing'', ''30 days'').';
    END IF;
    DELETE FROM "public"."inbox" AS gone
    WHERE gone.consumer = inbox_prune.consumer AND gone.event_id = ANY (ARRAY(
        SELECT old.event_id FROM "public"."inbox" AS old
        WHERE old.consumer = inbox_prune.consumer AND old.claimed_at < now() - older_than
        ORDER BY old.claimed_at LIMIT batch
    ));
    GET DIAGNOSTICS pruned = ROW_COUNT;
    RETURN pruned;
END
$walpost$;

COMMENT ON FUNCTION "public".inbox_claim(text, uuid) IS 'walpost: claims an event for a consumer; true the first time';
COMMENT ON FUNCTION "public".inbox_prune(text, interval, integer) IS 'walpost: deletes old marks of a consumer in bounded batches';
