// A shop that writes events with its orders, and a shipping service that acts once on each: pgx.
//
//	DATABASE_URL=postgres://shop@localhost/shop go run . write
//	DATABASE_URL=postgres://shipping@localhost/shop go run . consume 0199c0de-... ...
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// placeOrder commits order and event together, or neither.
func placeOrder(ctx context.Context, conn *pgx.Conn, order int64, payload string) (id string, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", order); err != nil {
			return err
		}
		event := "SELECT outbox_emit('order.placed', $1, $2)"
		return tx.QueryRow(ctx, event, strconv.FormatInt(order, 10), payload).Scan(&id)
	})
	return id, err
}

// placeTracedOrder passes the payload as jsonb, and headers of its own.
func placeTracedOrder(ctx context.Context, conn *pgx.Conn, order int64, traceparent string) (id string, err error) {
	payload := map[string]any{"order": order, "items": []string{"tea", "cup"}}
	headers := map[string]string{"traceparent": traceparent}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", order); err != nil {
			return err
		}
		event := "SELECT outbox_emit('order.placed', $1, $2::jsonb, $3)"
		return tx.QueryRow(ctx, event, strconv.FormatInt(order, 10), payload, headers).Scan(&id)
	})
	return id, err
}

// forgetOrder has no payload: a record without a value, which a compacted topic takes for a deletion.
func forgetOrder(ctx context.Context, conn *pgx.Conn, order int64) (id string, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "DELETE FROM orders WHERE id = $1", order); err != nil {
			return err
		}
		event := "SELECT outbox_emit('order.forgotten', $1, $2)"
		return tx.QueryRow(ctx, event, strconv.FormatInt(order, 10), nil).Scan(&id)
	})
	return id, err
}

var errRefused = errors.New("the card was refused")

// refuseOrder commits nothing, so nothing has happened: the order is gone, and its event never arrives.
func refuseOrder(ctx context.Context, conn *pgx.Conn, order int64) error {
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", order); err != nil {
			return err
		}
		event := "SELECT outbox_emit('order.placed', $1, '{}')"
		if _, err := tx.Exec(ctx, event, strconv.FormatInt(order, 10)); err != nil {
			return err
		}
		return errRefused
	})
	if errors.Is(err, errRefused) {
		return nil
	}
	return err
}

// shipOnce commits the mark and the shipment together, or neither. False: the order was shipped before.
func shipOnce(ctx context.Context, conn *pgx.Conn, eventID string) (isFirst bool, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		claim := "SELECT inbox_claim('shipping', $1)"
		if err := tx.QueryRow(ctx, claim, eventID).Scan(&isFirst); err != nil || !isFirst {
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO shipments (event_id) VALUES ($1)", eventID)
		return err
	})
	return isFirst, err
}

func write(ctx context.Context, conn *pgx.Conn) error {
	placed, err := placeOrder(ctx, conn, 1, `{"order": 1,  "drink": "☕"}`)
	if err != nil {
		return err
	}
	traced, err := placeTracedOrder(ctx, conn, 2, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	if err != nil {
		return err
	}
	if err := refuseOrder(ctx, conn, 3); err != nil {
		return err
	}
	forgotten, err := forgetOrder(ctx, conn, 1)
	fmt.Printf("%s\n%s\n%s\n", placed, traced, forgotten)
	return err
}

func consume(ctx context.Context, conn *pgx.Conn, eventIDs []string) error {
	for _, eventID := range eventIDs {
		isFirst, err := shipOnce(ctx, conn, eventID)
		if err != nil {
			return err
		}
		outcome := "repeated"
		if isFirst {
			outcome = "shipped"
		}
		fmt.Println(eventID, outcome)
	}
	return nil
}

func main() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)
	switch {
	case len(os.Args) == 2 && os.Args[1] == "write":
		err = write(ctx, conn)
	case len(os.Args) > 2 && os.Args[1] == "consume":
		err = consume(ctx, conn, os.Args[2:])
	default:
		err = errors.New("usage: client write | client consume EVENT_ID...")
	}
	if err != nil {
		log.Fatal(err)
	}
}
