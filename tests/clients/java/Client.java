import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.Arrays;
import java.util.UUID;

/**
 * A shop that writes events with its orders, and a shipping service that acts once on each: JDBC.
 *
 * <pre>
 * DATABASE_URL='jdbc:postgresql://localhost/shop?user=shop' java -cp postgresql.jar Client.java write
 * DATABASE_URL='jdbc:postgresql://localhost/shop?user=shipping' java -cp postgresql.jar Client.java consume 0199c0de-... ...
 * </pre>
 */
public class Client {
    /** What is done between begin and commit. */
    interface Work<T> {
        T run() throws SQLException;
    }

    /** Commits when the work returns, rolls back when it throws. */
    static <T> T inTransaction(Connection connection, Work<T> work) throws SQLException {
        connection.setAutoCommit(false);
        try {
            T result = work.run();
            connection.commit();
            return result;
        } catch (SQLException | RuntimeException error) {
            connection.rollback();
            throw error;
        } finally {
            connection.setAutoCommit(true);
        }
    }

    /** Order and event are committed together, or neither is. */
    static UUID placeOrder(Connection connection, long order, String payload) throws SQLException {
        return inTransaction(connection, () -> {
            insertOrder(connection, order);
            try (PreparedStatement emit = connection.prepareStatement("SELECT outbox_emit('order.placed', ?, ?)")) {
                emit.setString(1, Long.toString(order));
                emit.setString(2, payload);
                return answer(emit, UUID.class);
            }
        });
    }

    /** The payload as jsonb, and headers of its own. */
    static UUID placeTracedOrder(Connection connection, long order, String traceparent) throws SQLException {
        String statement = "SELECT outbox_emit('order.placed', ?, ?::jsonb, jsonb_build_object('traceparent', ?))";
        return inTransaction(connection, () -> {
            insertOrder(connection, order);
            try (PreparedStatement emit = connection.prepareStatement(statement)) {
                emit.setString(1, Long.toString(order));
                emit.setString(2, "{\"order\":" + order + ",\"items\":[\"tea\",\"cup\"]}");
                emit.setString(3, traceparent);
                return answer(emit, UUID.class);
            }
        });
    }

    /** Without a payload: a record without a value, which a compacted topic takes for a deletion. */
    static UUID forgetOrder(Connection connection, long order) throws SQLException {
        return inTransaction(connection, () -> {
            try (PreparedStatement delete = connection.prepareStatement("DELETE FROM orders WHERE id = ?")) {
                delete.setLong(1, order);
                delete.executeUpdate();
            }
            try (PreparedStatement emit = connection.prepareStatement("SELECT outbox_emit('order.forgotten', ?, ?)")) {
                emit.setString(1, Long.toString(order));
                emit.setString(2, null);
                return answer(emit, UUID.class);
            }
        });
    }

    /** What is not committed has not happened: the order is gone, and its event never arrives. */
    static void refuseOrder(Connection connection, long order) throws SQLException {
        try {
            inTransaction(connection, () -> {
                insertOrder(connection, order);
                try (PreparedStatement emit =
                        connection.prepareStatement("SELECT outbox_emit('order.placed', ?, '{}')")) {
                    emit.setString(1, Long.toString(order));
                    answer(emit, UUID.class);
                }
                throw new IllegalStateException("the card was refused");
            });
        } catch (IllegalStateException refused) {
            // rolled back
        }
    }

    /** The mark and the shipment are committed together, or neither is. False: the order was shipped before. */
    static boolean shipOnce(Connection connection, UUID eventId) throws SQLException {
        return inTransaction(connection, () -> {
            boolean isFirst;
            try (PreparedStatement claim = connection.prepareStatement("SELECT inbox_claim('shipping', ?)")) {
                claim.setObject(1, eventId);
                isFirst = answer(claim, Boolean.class);
            }
            if (isFirst) {
                try (PreparedStatement ship =
                        connection.prepareStatement("INSERT INTO shipments (event_id) VALUES (?)")) {
                    ship.setObject(1, eventId);
                    ship.executeUpdate();
                }
            }
            return isFirst;
        });
    }

    static void insertOrder(Connection connection, long order) throws SQLException {
        try (PreparedStatement insert = connection.prepareStatement("INSERT INTO orders (id) VALUES (?)")) {
            insert.setLong(1, order);
            insert.executeUpdate();
        }
    }

    /** The first column of the only row. */
    static <T> T answer(PreparedStatement query, Class<T> type) throws SQLException {
        try (ResultSet rows = query.executeQuery()) {
            rows.next();
            return rows.getObject(1, type);
        }
    }

    public static void main(String[] arguments) throws SQLException {
        String command = arguments.length > 0 ? arguments[0] : "";
        try (Connection connection = DriverManager.getConnection(System.getenv("DATABASE_URL"))) {
            if (command.equals("write")) {
                System.out.println(placeOrder(connection, 1, "{\"order\": 1,  \"drink\": \"\u2615\"}"));
                String traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
                System.out.println(placeTracedOrder(connection, 2, traceparent));
                refuseOrder(connection, 3);
                System.out.println(forgetOrder(connection, 1));
            } else if (command.equals("consume")) {
                for (String eventId : Arrays.copyOfRange(arguments, 1, arguments.length)) {
                    boolean isFirst = shipOnce(connection, UUID.fromString(eventId));
                    System.out.println(eventId + (isFirst ? " shipped" : " repeated"));
                }
            } else {
                System.err.println("usage: Client write | Client consume EVENT_ID...");
                System.exit(2);
            }
        }
    }
}
