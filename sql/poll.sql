-- What an outbox needs to be polled (postgres.source = "poll"): a mark for what was delivered, a count of failed tries, and
-- the indexes that find what is left. With "wal" none of this is needed.
-- `walpost init` runs this file with the configured names. It may be run again. On a large table that is in use, build the
-- indexes by hand first: CREATE INDEX CONCURRENTLY.

ALTER TABLE "public"."outbox" ADD COLUMN IF NOT EXISTS "delivered_at" timestamptz;
ALTER TABLE "public"."outbox" ADD COLUMN IF NOT EXISTS "attempts" integer NOT NULL DEFAULT 0;

COMMENT ON COLUMN "public"."outbox"."delivered_at" IS
    'When the brokers had the event; NULL until then. Set by walpost.';
COMMENT ON COLUMN "public"."outbox"."attempts" IS
    'How often the delivery of the event failed. Set by walpost.';

-- The next rows in their order. Holds undelivered rows only, so it stays small.
CREATE INDEX IF NOT EXISTS "outbox_undelivered_idx" ON "public"."outbox" ("created_at", "id") WHERE "delivered_at" IS NULL;
-- Events that failed, by key: later ones of the same key wait for them.
CREATE INDEX IF NOT EXISTS "outbox_failed_idx" ON "public"."outbox" ("key") WHERE "delivered_at" IS NULL AND "attempts" > 0;
-- For retention.
CREATE INDEX IF NOT EXISTS "outbox_delivered_idx" ON "public"."outbox" ("delivered_at");
