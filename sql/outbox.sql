-- The outbox: the application inserts an event in the same transaction as the change that the event is about.
-- walpost reads the inserts from the write-ahead log, never from the table; so rows may be deleted at any time.
-- `walpost init` runs this file with the configured name. It may be run again.

CREATE TABLE IF NOT EXISTS "public"."outbox" (
    id         uuid        NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    event_type text        NOT NULL,
    key        text,
    payload    json,
    headers    jsonb       CHECK (jsonb_typeof(headers) = 'object'),
    created_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE "public"."outbox" IS
    'Transactional outbox: each inserted row becomes one Kafka record once its transaction has committed. Published by walpost.';
COMMENT ON COLUMN "public"."outbox".id IS
    'Identity of the event: the header "id". The same at every re-send, so consumers can drop what they have seen.';
COMMENT ON COLUMN "public"."outbox".event_type IS
    'Kind of the event, for example order.created: decides about the topic, and is the header "event_type".';
COMMENT ON COLUMN "public"."outbox".key IS
    'Record key: events of one key stay in commit order. NULL: no key, any partition; '''' is an empty key.';
-- json keeps the application's text byte for byte and is sent as it lies there. jsonb would be printed anew for every row
-- (spaces, key order and duplicate keys change) at about twice the cost for the server's WAL sender. text and bytea work too.
COMMENT ON COLUMN "public"."outbox".payload IS
    'Record value, byte for byte. NULL: a record without a value (a tombstone on compacted topics).';
COMMENT ON COLUMN "public"."outbox".headers IS
    'A JSON object whose members become record headers, for example {"traceparent": "00-..."}. May be NULL.';
COMMENT ON COLUMN "public"."outbox".created_at IS
    'Timestamp of the record. Retention deletes delivered rows by it.';

-- For retention, which looks for the oldest rows.
CREATE INDEX IF NOT EXISTS "outbox_created_at_idx" ON "public"."outbox" (created_at);
