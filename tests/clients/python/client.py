"""A shop that writes events with its orders, and a shipping service that acts once on each: psycopg 3.

    DATABASE_URL=postgres://shop@localhost/shop python3 client.py write
    DATABASE_URL=postgres://shipping@localhost/shop python3 client.py consume 0199c0de-... ...
"""

import os
import sys

import psycopg
from psycopg.types.json import Jsonb


def place_order(connection, order, payload):
    """Order and event are committed together, or neither is."""
    with connection.transaction():
        connection.execute("INSERT INTO orders (id) VALUES (%s)", [order])
        event = connection.execute("SELECT outbox_emit('order.placed', %s, %s)", [str(order), payload])
        return event.fetchone()[0]


def place_traced_order(connection, order, traceparent):
    """The payload as jsonb, and headers of its own."""
    payload = {"order": order, "items": ["tea", "cup"]}
    headers = {"traceparent": traceparent}
    with connection.transaction():
        connection.execute("INSERT INTO orders (id) VALUES (%s)", [order])
        event = connection.execute(
            "SELECT outbox_emit('order.placed', %s, %s, %s)", [str(order), Jsonb(payload), Jsonb(headers)]
        )
        return event.fetchone()[0]


def forget_order(connection, order):
    """Without a payload: a record without a value, which a compacted topic takes for a deletion."""
    with connection.transaction():
        connection.execute("DELETE FROM orders WHERE id = %s", [order])
        event = connection.execute("SELECT outbox_emit('order.forgotten', %s, %s)", [str(order), None])
        return event.fetchone()[0]


def refuse_order(connection, order):
    """What is not committed has not happened: the order is gone, and its event never arrives."""
    with connection.transaction():
        connection.execute("INSERT INTO orders (id) VALUES (%s)", [order])
        connection.execute("SELECT outbox_emit('order.placed', %s, '{}')", [str(order)])
        raise psycopg.Rollback


def ship_once(connection, event_id):
    """The mark and the shipment are committed together, or neither is. False: the order was shipped before."""
    with connection.transaction():
        claim = connection.execute("SELECT inbox_claim('shipping', %s)", [event_id])
        is_first = claim.fetchone()[0]
        if is_first:
            connection.execute("INSERT INTO shipments (event_id) VALUES (%s)", [event_id])
        return is_first


def main(arguments):
    # with autocommit, each transaction() is one of the server's
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        match arguments:
            case ["write"]:
                print(place_order(connection, 1, '{"order": 1,  "drink": "☕"}'))
                traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
                print(place_traced_order(connection, 2, traceparent))
                refuse_order(connection, 3)
                print(forget_order(connection, 1))
            case ["consume", *event_ids]:
                for event_id in event_ids:
                    print(event_id, "shipped" if ship_once(connection, event_id) else "repeated")
            case _:
                sys.exit("usage: client.py write | client.py consume EVENT_ID...")


if __name__ == "__main__":
    main(sys.argv[1:])
