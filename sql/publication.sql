-- What walpost is told: inserts into the outbox, all columns, all rows. Create it before the replication slot: the server
-- decodes each change as of the time when it was written, and a publication that did not exist then is an error or a gap.
-- Updates and deletes are left out: retention would only make the server send them, and publishing them would forbid them
-- on tables without a primary key. Needs CREATE on the database and ownership of the table.
-- `walpost init` runs this file with the configured names. It may be run again; it never alters a publication that exists.

DO $walpost$
BEGIN
    CREATE PUBLICATION "walpost" FOR TABLE "public"."outbox"
        WITH (publish = 'insert', publish_via_partition_root = true);
EXCEPTION WHEN duplicate_object THEN
    RAISE NOTICE 'the publication exists already and stays as it is; walpost check tells whether it does';
END
$walpost$;
