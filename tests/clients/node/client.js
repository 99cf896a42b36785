// A shop that writes events with its orders, and a shipping service that acts once on each: pg.
//
//   DATABASE_URL=postgres://shop@localhost/shop node client.js write
//   DATABASE_URL=postgres://shipping@localhost/shop node client.js consume 0199c0de-... ...
'use strict';

const { Client } = require('pg');

// Commits when the work is done, rolls back when it throws.
async function inTransaction(client, work) {
  await client.query('BEGIN');
  try {
    const result = await work();
    await client.query('COMMIT');
    return result;
  } catch (error) {
    await client.query('ROLLBACK');
    throw error;
  }
}

// Order and event are committed together, or neither is.
function placeOrder(client, order, payload) {
  return inTransaction(client, async () => {
    await client.query('INSERT INTO orders (id) VALUES ($1)', [order]);
    const event = "SELECT outbox_emit('order.placed', $1, $2) AS id";
    return (await client.query(event, [String(order), payload])).rows[0].id;
  });
}

// The payload as jsonb, and headers of its own: pg turns objects into JSON.
function placeTracedOrder(client, order, traceparent) {
  const payload = { order, items: ['tea', 'cup'] };
  return inTransaction(client, async () => {
    await client.query('INSERT INTO orders (id) VALUES ($1)', [order]);
    const event = "SELECT outbox_emit('order.placed', $1, $2::jsonb, $3) AS id";
    return (await client.query(event, [String(order), payload, { traceparent }])).rows[0].id;
  });
}

// Without a payload: a record without a value, which a compacted topic takes for a deletion.
function forgetOrder(client, order) {
  return inTransaction(client, async () => {
    await client.query('DELETE FROM orders WHERE id = $1', [order]);
    const event = "SELECT outbox_emit('order.forgotten', $1, $2) AS id";
    return (await client.query(event, [String(order), null])).rows[0].id;
  });
}

class Refused extends Error {}

// What is not committed has not happened: the order is gone, and its event never arrives.
async function refuseOrder(client, order) {
  try {
    await inTransaction(client, async () => {
      await client.query('INSERT INTO orders (id) VALUES ($1)', [order]);
      await client.query("SELECT outbox_emit('order.placed', $1, '{}')", [String(order)]);
      throw new Refused();
    });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
  }
}

// The mark and the shipment are committed together, or neither is. False: the order was shipped before.
function shipOnce(client, eventId) {
  return inTransaction(client, async () => {
    const claim = "SELECT inbox_claim('shipping', $1) AS is_first";
    const isFirst = (await client.query(claim, [eventId])).rows[0].is_first;
    if (isFirst) await client.query('INSERT INTO shipments (event_id) VALUES ($1)', [eventId]);
    return isFirst;
  });
}

async function main([command, ...eventIds]) {
  const client = new Client({ connectionString: process.env.DATABASE_URL });
  await client.connect();
  try {
    if (command === 'write') {
      console.log(await placeOrder(client, 1, '{"order": 1,  "drink": "☕"}'));
      const traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01';
      console.log(await placeTracedOrder(client, 2, traceparent));
      await refuseOrder(client, 3);
      console.log(await forgetOrder(client, 1));
    } else if (command === 'consume') {
      for (const eventId of eventIds) {
        console.log(eventId, (await shipOnce(client, eventId)) ? 'shipped' : 'repeated');
      }
    } else {
      throw new Error('usage: client.js write | client.js consume EVENT_ID...');
    }
  } finally {
    await client.end();
  }
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
