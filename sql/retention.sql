-- What walpost remembers of what it has delivered, so that retention can tell delivered rows of the outbox from others,
-- also after a restart. Small: one row for each table (or partition) and each time that walpost could not know what had
-- become of the slot meanwhile. To empty these tables is safe: rows written before then stay in the outbox until
-- someone deletes them. Only walpost and the owner may write here: rows of the outbox are deleted by what stands here.
-- `walpost init` runs this file with the configured schema. It may be run again.

CREATE TABLE IF NOT EXISTS "public"."walpost_delivered" (
    slot      text        NOT NULL,
    system    text        NOT NULL,
    relation  oid         NOT NULL,
    shape     text        NOT NULL,
    since     bigint      NOT NULL,
    until     bigint      NOT NULL,
    since_at  timestamptz NOT NULL DEFAULT now(),
    confirmed pg_lsn      NOT NULL,
    PRIMARY KEY (slot, system, relation, since)
);

COMMENT ON TABLE "public"."walpost_delivered" IS
    'Kept by walpost: rows of the outbox written by transactions from "since" to before "until" have been delivered.';

CREATE TABLE IF NOT EXISTS "public"."walpost_dead_lettered" (
    slot        text        NOT NULL,
    id          text        NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, slot)
);

COMMENT ON TABLE "public"."walpost_dead_lettered" IS
    'Kept by walpost: events that went to the dead-letter topic. Their rows in the outbox have a retention of their own.';
