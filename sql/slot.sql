-- The replication slot, last: everything committed after its creation reaches Kafka, and it keeps the write-ahead log on the
-- server's disk until walpost has delivered it. A slot that nobody reads fills the disk: bound it with
-- max_slot_wal_keep_size, and drop it when walpost is retired. Needs the REPLICATION attribute and wal_level = logical, and
-- waits for every transaction that runs in the cluster. `walpost init` also counts the rows that are older than the slot.

SELECT pg_create_logical_replication_slot('walpost', 'pgoutput')
WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = 'walpost');
