-- outbox_emit: writes one event within the transaction of its caller and returns the event's id. For every language that
-- can run a statement: SELECT outbox_emit('order.paid', '42', '{"order": 42}', '{"traceparent": "00-..."}').
-- One function for each type that a payload may come in; a literal or parameter without a type is text. A NULL payload is a
-- record without a value. The caller needs INSERT on the table and nothing else: the functions run with its rights, and read
-- nothing. Every name is qualified, so no search_path can lead them elsewhere.
-- `walpost init` runs this file with the configured name, where the outbox has the default columns. It may be run again.

CREATE OR REPLACE FUNCTION "public".outbox_emit(event_type text, key text, payload text, headers jsonb DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql VOLATILE SECURITY INVOKER AS $walpost$
DECLARE
    -- made here, since INSERT ... RETURNING would need SELECT
    event_id CONSTANT pg_catalog.uuid := pg_catalog.gen_random_uuid();
BEGIN
    IF event_type IS NULL THEN
        RAISE EXCEPTION 'outbox_emit: event_type must not be null' USING
            ERRCODE = 'null_value_not_allowed', HINT = 'Pass the kind of the event, for example order.paid.';
    END IF;
    INSERT INTO "public"."outbox" (id, event_type, key, payload, headers)
    VALUES (event_id, event_type, key, payload::pg_catalog.json, headers);
    RETURN event_id;
END
$walpost$;

CREATE OR REPLACE FUNCTION "public".outbox_emit(event_type text, key text, payload json, headers jsonb DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql VOLATILE SECURITY INVOKER AS $walpost$
BEGIN
    RETURN "public".outbox_emit(event_type, key, payload::pg_catalog.text, headers);
END
$walpost$;

CREATE OR REPLACE FUNCTION "public".outbox_emit(event_type text, key text, payload jsonb, headers jsonb DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql VOLATILE SECURITY INVOKER AS $walpost$
BEGIN
    RETURN "public".outbox_emit(event_type, key, payload::pg_catalog.text, headers);
END
$walpost$;

-- Bytes are the text of the payload in UTF-8, as serializers in many languages return it.
CREATE OR REPLACE FUNCTION "public".outbox_emit(event_type text, key text, payload bytea, headers jsonb DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql VOLATILE SECURITY INVOKER AS $walpost$
DECLARE
    event_id CONSTANT pg_catalog.uuid := pg_catalog.gen_random_uuid();
BEGIN
    IF event_type IS NULL THEN
        RAISE EXCEPTION 'outbox_emit: event_type must not be null' USING
            ERRCODE = 'null_value_not_allowed', HINT = 'Pass the kind of the event, for example order.paid.';
    END IF;
    INSERT INTO "public"."outbox" (id, event_type, key, payload, headers)
    VALUES (event_id, event_type, key, pg_catalog.convert_from(payload, 'UTF8')::pg_catalog.json, headers);
    RETURN event_id;
END
$walpost$;

COMMENT ON FUNCTION "public".outbox_emit(text, text, text, jsonb) IS 'walpost: writes an event into the outbox, returns its id';
COMMENT ON FUNCTION "public".outbox_emit(text, text, json, jsonb) IS 'walpost: writes an event into the outbox, returns its id';
COMMENT ON FUNCTION "public".outbox_emit(text, text, jsonb, jsonb) IS 'walpost: writes an event into the outbox, returns its id';
COMMENT ON FUNCTION "public".outbox_emit(text, text, bytea, jsonb) IS 'walpost: writes an event into the outbox, returns its id';
