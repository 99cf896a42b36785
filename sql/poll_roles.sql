-- Where the outbox is polled, walpost needs no REPLICATION, and marks rows in place. It can change nothing else in them.
GRANT UPDATE ("delivered_at", "attempts") ON "public"."outbox" TO walpost_relay;
