//! `kafka.delivery = "exactly_once"`: whoever reads committed records sees each event once, whatever ends walpost.

use std::{thread, time::Duration};

use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::{
    denied::{ALLOW, CREATE_ACLS, DELETE_ACLS, DENY, DESCRIBE, GROUP, READ, TRANSACTIONAL_ID, WRITE, acl, acl_on, ask},
    outbox::{Outbox, PATIENCE, at_both_ends, deliveries, stays},
    services::{
        kafka::Kafka,
        postgres::{Postgres, Version},
        topics::Received,
        wait_until,
        walpost::Walpost,
    },
    victim::victim,
};

/// The keys that switch it on.
const ONCE: (&str, &str) = ("WALPOST_KAFKA_DELIVERY", "exactly_once");

impl Outbox<'_> {
    /// A walpost that streams under exactly-once delivery.
    fn relay_once(&self, more: &[(&str, &str)]) -> Walpost {
        self.relay(&[&[ONCE], more].concat())
    }

    /// A start that is refused: what it said.
    fn refused_once(&self, more: &[(&str, &str)]) -> String {
        let ended = self.command(&["run"], &[&[ONCE, ("WALPOST_HTTP_LISTEN", "")], more].concat());
        assert_eq!(ended.code, Some(3), "{}", ended.output);
        ended.output
    }

    /// A start that accepts what would be refused.
    fn relay_accepting(&self, flag: &str) -> Walpost {
        let walpost = self.start(&["run", flag], &[ONCE, ("WALPOST_HTTP_LISTEN", "127.0.0.1:0")]);
        walpost.wait_for_log(PATIENCE, "streaming slot=");
        walpost
    }

    /// Events with these numbers for ids.
    fn insert(&self, numbers: std::ops::RangeInclusive<u32>) {
        let (first, last) = (numbers.start(), numbers.end());
        self.execute(&format!(
            "INSERT INTO outbox SELECT n, 't', 'k' || n % 7, n FROM generate_series({first}, {last}) n"
        ));
    }

    fn end_walsender(&self) {
        let slot = self.database.name();
        self.execute(&format!(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'"
        ));
    }

    /// The topic of its position.
    fn progress_topic(&self) -> String {
        format!("walpost.progress.{}", self.database.name())
    }
}

/// Claims that the events with these numbers are there, each once.
fn claim_once(records: &[Received], numbers: std::ops::RangeInclusive<u32>) {
    let deliveries = deliveries(records);
    let wrong: Vec<_> = numbers
        .clone()
        .map(|number| (number, deliveries.get(&number.to_string()).copied().unwrap_or_default()))
        .filter(|(_, times)| *times != 1)
        .collect();
    assert!(wrong.is_empty(), "event and how often: {wrong:?}");
    assert_eq!(deliveries.len(), numbers.count());
}

const TABLE: &str = "CREATE TABLE outbox (id text, event_type text, key text, payload text)";

fn with_text_ids(version: Version) -> Outbox<'static> {
    Outbox::with(Postgres::shared(version), Kafka::shared(), TABLE)
}

#[test]
fn events_arrive_once_and_the_position_behind_them_is_stored() {
    at_both_ends(|version| {
        let outbox = with_text_ids(version);
        let topic = outbox.topic("t", 3);
        let walpost = outbox.relay_once(&[]);
        outbox.insert(1..=500);
        outbox.wait_until_confirmed();
        claim_once(&outbox.kafka.read_all(&[&topic]), 1..=500);
        let stored = outbox.kafka.read_all(&[&outbox.progress_topic()]);
        let last = stored.last().expect("a position");
        let value = String::from_utf8_lossy(last.value.as_deref().expect("a value"));
        assert_eq!(last.key.as_deref(), Some(outbox.database.name().as_bytes()));
        assert!(value.contains(outbox.database.name()) && value.contains("end_lsn"), "{value}");
        walpost.wait_until_ready(PATIENCE);
        assert!(walpost.metric("walpost_kafka_transactions_total{outcome=\"committed\"}") >= 1.0);
    });
}

/// Case 13, where not even a repetition is allowed.
#[test]
fn a_transaction_that_is_too_large_for_one_is_split_and_a_kill_in_between_repeats_nothing() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let limit = ("WALPOST_LIMITS_IN_FLIGHT_EVENTS", "1000");
    let walpost = outbox.relay_once(&[limit, ("CRASH_KILL", "after_commit:4")]);
    outbox.insert(1..=20000);
    walpost.wait(PATIENCE);
    let walpost = outbox.relay_once(&[limit]);
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=20000);
    assert!(walpost.metric("walpost_skipped_events_total") >= 1000.0, "{}", walpost.log());
}

/// Case 17.
#[test]
fn the_slot_follows_a_log_without_events() {
    let outbox = with_text_ids(Version::NEWEST);
    let _walpost = outbox.relay_once(&[]);
    outbox.execute("CREATE TABLE other (a text)");
    let before = outbox.confirmed();
    for _ in 0..2 {
        outbox.execute("INSERT INTO other SELECT md5(n::text) FROM generate_series(1, 5000) n");
        outbox.wait_until_confirmed();
    }
    assert!(outbox.confirmed() > before);
}

/// The last transaction is committed and the slot has not heard of it.
#[test]
fn a_kill_between_commit_and_confirm_repeats_nothing() {
    at_both_ends(|version| {
        let outbox = with_text_ids(version);
        let topic = outbox.topic("t", 3);
        let walpost = outbox.relay_once(&[("CRASH_KILL", "after_commit:3")]);
        for number in 1..=9 {
            outbox.insert(number * 10..=number * 10 + 9);
            thread::sleep(Duration::from_millis(120));
        }
        walpost.wait(PATIENCE);
        outbox.insert(1..=9);
        let _walpost = outbox.relay_once(&[]);
        outbox.wait_until_confirmed();
        claim_once(&outbox.kafka.read_all(&[&topic]), 1..=99);
    });
}

/// Brokers that lose a transaction behind their word for it cannot be arranged; a walpost that takes their word where they gave
/// none can.
#[test]
fn a_transaction_that_was_called_committed_and_is_not_there_is_sent_again() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let walpost = outbox.relay_once(&[("CRASH_BUG", "commit_for_nothing"), ("WALPOST_KAFKA_COMMIT_INTERVAL_MS", "20")]);
    let mut first = 1;
    let repaired = || walpost.metrics().get("walpost_producer_restarts_total{reason=\"not_committed\"}").copied();
    while repaired().is_none_or(|times| times < 3.0) {
        assert!(first < 20_000, "nobody sees what is missing: {}", walpost.log());
        outbox.insert(first..=first + 9);
        first += 10;
        outbox.wait_until_confirmed();
    }
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=first - 1);
    assert!(walpost.log().contains("WP-409"), "{}", walpost.log());
}

#[test]
fn a_process_that_wakes_up_after_another_took_its_place_publishes_nothing() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    drop(outbox.relay_once(&[])); // the slot, from here on
    for point in ["before_commit", "after_commit", "after_enqueue", "after_fence"] {
        let zombie =
            outbox.start(&["run"], &[ONCE, ("CRASH_STOP", &format!("{point}:1")), ("WALPOST_HTTP_LISTEN", "")]);
        let before = outbox.kafka.read_all(&[&topic]).len();
        let first = u32::try_from(before).expect("few") + 1;
        outbox.insert(first..=first + 99);
        wait_until(PATIENCE, point, || zombie.process().is_frozen());
        outbox.end_walsender();
        let heir = outbox.relay_once(&[]);
        outbox.insert(first + 100..=first + 199);
        outbox.wait_until_confirmed();
        zombie.thaw();
        outbox.insert(first + 200..=first + 299);
        outbox.wait_until_confirmed();
        claim_once(&outbox.kafka.read_all(&[&topic]), 1..=first + 299);
        drop((zombie, heir));
    }
}

/// Case 12.
#[test]
fn a_second_walpost_waits_and_takes_over_at_once_without_a_repetition() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let first = outbox.relay_once(&[]);
    let second = outbox.start(&["run"], &[ONCE, ("WALPOST_HTTP_LISTEN", "127.0.0.1:0")]);
    outbox.insert(1..=100);
    outbox.wait_until_confirmed();
    assert!(first.process().exit_status().is_none(), "the one that waits does not end the one that streams");
    first.kill9();
    outbox.insert(101..=200);
    second.wait_for_log(Duration::from_secs(5), "streaming slot=");
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=200);
}

#[test]
fn without_the_record_of_what_was_published_nothing_is_until_somebody_says_so() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let walpost = outbox.relay_once(&[]);
    outbox.insert(1..=50);
    outbox.wait_until_confirmed();
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    outbox.kafka.delete_topic(&outbox.progress_topic());
    outbox.insert(51..=100);
    let said = outbox.refused_once(&[]);
    assert!(said.contains("--accept-duplicates") && said.contains(&outbox.progress_topic()), "{said}");
    assert_eq!(outbox.kafka.read_all(&[&topic]).len(), 50);
    let walpost = outbox.relay_accepting("--accept-duplicates");
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=100);
    assert!(walpost.log().contains("accepted:"), "{}", walpost.log());
    // and now there is one
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    let _walpost = outbox.relay_once(&[]);
}

/// Case 6, under exactly-once delivery.
#[test]
fn a_slot_that_was_created_again_is_not_taken_for_the_one_before() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let slot = outbox.database.name();
    let walpost = outbox.relay_once(&[]);
    outbox.insert(1..=50);
    outbox.wait_until_confirmed();
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    outbox.execute(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    outbox.insert(51..=60);
    let said = outbox.refused_once(&[]);
    assert!(said.contains("does not exist") && said.contains("walpost init"), "{said}");
    outbox.execute(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"));
    let said = outbox.refused_once(&[]);
    assert!(said.contains("beyond") && said.contains("--accept-gap"), "{said}");
    outbox.refused_once(&[]);
    let walpost = outbox.relay_accepting("--accept-gap");
    outbox.insert(51..=60);
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=60);
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    let _walpost = outbox.relay_once(&[]);
}

#[test]
fn two_databases_do_not_share_a_progress_topic() {
    let ours = with_text_ids(Version::NEWEST);
    ours.topic("t", 1);
    let walpost = ours.relay_once(&[]);
    ours.insert(1..=5);
    ours.wait_until_confirmed();
    let theirs = with_text_ids(Version::OLDEST);
    let topic = ours.progress_topic();
    let same = [("WALPOST_POSTGRES_SLOT", ours.database.name()), ("WALPOST_KAFKA_PROGRESS_TOPIC", topic.as_str())];
    let said = theirs.refused_once(&same);
    assert!(said.contains("kafka.progress_topic") && said.contains("is the record of"), "{said}");
    let init = theirs.command(&["init"], &[&[ONCE][..], &same].concat());
    assert_ne!(init.code, Some(0), "{}", init.output);
    // the first one was fenced by the attempts, and goes on
    ours.insert(6..=10);
    ours.wait_until_confirmed();
    drop(walpost);
    let _walpost = ours.relay_once(&[]);
}

#[test]
fn a_transaction_of_somebody_else_in_the_progress_topic_is_waited_for() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let walpost = outbox.relay_once(&[("CRASH_KILL", "after_commit:3")]);
    for number in 1..=4 {
        outbox.insert(number * 10..=number * 10 + 9);
        thread::sleep(Duration::from_millis(150));
    }
    walpost.wait(PATIENCE);
    let mut config = outbox.kafka.client_config();
    config.set("transactional.id", format!("{}.stranger", outbox.database.name()));
    let stranger: BaseProducer = config.create().expect("a client needs no broker to be created");
    stranger.init_transactions(PATIENCE).expect("the broker answers");
    stranger.begin_transaction().expect("a transaction");
    let progress = outbox.progress_topic();
    stranger.send(BaseRecord::to(&progress).key("stranger").payload("x")).expect("a record");
    stranger.flush(PATIENCE).expect("the broker answers");
    let walpost = outbox.relay_once(&[]);
    walpost.wait_for_log(PATIENCE, "another producer has a transaction open");
    let before = outbox.kafka.read_all(&[&topic]).len();
    stays(Duration::from_secs(1), "nothing is published", || outbox.kafka.read_all(&[&topic]).len() == before);
    stranger.abort_transaction(PATIENCE).expect("the broker answers");
    outbox.insert(1..=9);
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=49);
}

#[test]
fn the_mode_changes_in_both_directions_without_a_loss() {
    let outbox = with_text_ids(Version::OLDEST);
    let topic = outbox.topic("t", 3);
    let stop = |walpost: Walpost| assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0));
    let walpost = outbox.relay(&[]);
    outbox.insert(1..=50);
    outbox.wait_until_confirmed();
    stop(walpost);
    outbox.insert(51..=100);
    assert!(outbox.refused_once(&[]).contains("--accept-duplicates"));
    let walpost = outbox.relay_accepting("--accept-duplicates");
    outbox.wait_until_confirmed();
    stop(walpost);
    outbox.insert(101..=150);
    let walpost = outbox.relay(&[]);
    outbox.wait_until_confirmed();
    stop(walpost);
    outbox.insert(151..=200);
    assert!(outbox.refused_once(&[]).contains("--accept-gap"));
    let _walpost = outbox.relay_accepting("--accept-gap");
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=200);
}

#[test]
fn poison_goes_to_the_dead_letter_topic_in_the_transaction_of_its_neighbours() {
    at_both_ends(|version| {
        let outbox = with_text_ids(version);
        let topic = outbox.topic("t", 3);
        let graves = outbox.topic("dead-letter", 1);
        let small = outbox.topic_name("small");
        outbox.kafka.create_topic(&small, 1, &[("max.message.bytes", "3000")]);
        let walpost = outbox.relay_once(&[("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &graves)]);
        let noise = "(SELECT string_agg(md5(n || '/' || m), '') FROM generate_series(1, 500) m)";
        outbox.execute(&format!(
            "INSERT INTO outbox SELECT n, CASE WHEN n IN (40, 70) THEN 'small' ELSE 't' END, 'k',
             CASE WHEN n IN (40, 70) THEN {noise} ELSE 'v' END FROM generate_series(1, 100) n"
        ));
        outbox.wait_until_confirmed();
        claim_once(&outbox.kafka.read_all(&[&topic, &graves, &small]), 1..=100);
        let buried = outbox.kafka.read_all(&[&graves]);
        let graves: Vec<_> = buried.iter().map(|grave| (grave.header("id"), grave.header("walpost_topic"))).collect();
        assert_eq!(graves, [(Some("40"), Some(small.as_str())), (Some("70"), Some(small.as_str()))]);
        let seen = outbox.kafka.read_all_uncommitted(&[&topic]).len();
        assert!(seen > 98, "the refused record spoiled a transaction: {seen}");
        // all of it was committed at once: its first and its last event lie in one unbroken run of offsets
        let offsets = |partition| -> Vec<i64> {
            let records = outbox.kafka.read_all(&[&topic]);
            records.iter().filter(|record| record.partition == partition).map(|record| record.offset).collect()
        };
        for partition in 0..3 {
            assert!(offsets(partition).windows(2).all(|pair| pair[1] == pair[0] + 1), "{:?}", offsets(partition));
        }
        walpost.wait_until_ready(PATIENCE);
        outbox.insert(101..=110);
        outbox.wait_until_confirmed();
        claim_once(&outbox.kafka.read_all(&[&topic, &buried[0].topic, &small]), 1..=110);
    });
}

#[test]
fn poison_without_a_dead_letter_topic_halts_and_shows_nothing_of_its_transaction() {
    let outbox = with_text_ids(Version::NEWEST);
    let topic = outbox.topic("t", 3);
    let compacted = outbox.topic_name("compacted");
    outbox.kafka.create_topic(&compacted, 1, &[("cleanup.policy", "compact")]);
    let walpost = outbox.relay_once(&[]);
    outbox.execute(
        "INSERT INTO outbox SELECT n, CASE n WHEN 7 THEN 'compacted' ELSE 't' END, CASE WHEN n <> 7 THEN 'k' END, 'v'
         FROM generate_series(1, 10) n",
    );
    assert_eq!(walpost.wait(PATIENCE).code(), Some(1), "{}", walpost.log());
    assert!(walpost.log().contains("event 7 is refused"), "{}", walpost.log());
    assert_eq!(outbox.kafka.read_all(&[&topic]).len(), 0, "nothing partial is visible");
    outbox.kafka.alter_topic(&compacted, &[("cleanup.policy", "delete")]);
    let _walpost = outbox.relay_once(&[]);
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic, &compacted]), 1..=10);
}

#[test]
fn a_broker_that_is_away_longer_than_a_transaction_may_last_repeats_nothing() {
    let kafka = Kafka::start(&crate::services::kafka::Settings::default());
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 3);
    let walpost = outbox.relay_once(&[("WALPOST_KAFKA_TRANSACTION_TIMEOUT_MS", "5000")]);
    outbox.insert(1..=100);
    outbox.wait_until_confirmed();
    kafka.freeze();
    outbox.insert(101..=200);
    let walsender = outbox.walsender();
    stays(Duration::from_secs(8), "walpost waits", || walpost.process().exit_status().is_none());
    kafka.thaw();
    outbox.wait_until_confirmed();
    outbox.insert(201..=300);
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&topic]), 1..=300);
    assert!(walsender.is_some());
}

#[test]
fn check_looks_at_the_progress_topic_and_says_what_it_cannot_see() {
    let outbox = with_text_ids(Version::NEWEST);
    let check = || outbox.command(&["check"], &[ONCE, ("WALPOST_HTTP_LISTEN", "")]).output;
    assert!(check().contains("is created together with slot"), "{}", check());
    drop(outbox.relay_once(&[]));
    let said = check();
    assert!(said.contains("keeps the record of what is published") && said.contains("cannot be seen"), "{said}");
    let progress = outbox.progress_topic();
    outbox.kafka.alter_topic(&progress, &[("cleanup.policy", "delete")]);
    for said in
        ["cleanup.policy = delete", "kafka-configs.sh --bootstrap-server", "--add-config cleanup.policy=compact"]
    {
        assert!(check().contains(said), "{}", check());
    }
    outbox.kafka.delete_topic(&progress);
    assert!(check().contains("--accept-duplicates"), "{}", check());
    outbox.kafka.create_topic(&progress, 2, &[]);
    assert!(check().contains("must have one"), "{}", check());
    let run = outbox.command(&["run"], &[ONCE, ("WALPOST_HTTP_LISTEN", "")]);
    assert_eq!(run.code, Some(2), "{}", run.output);
}

#[test]
fn what_the_brokers_deny_is_waited_for() {
    let kafka = victim();
    let outbox = Outbox::with(Postgres::shared(Version::NEWEST), &kafka, TABLE);
    let topic = outbox.topic("t", 1);
    // no group is joined, so none need be allowed
    ask(&kafka, CREATE_ACLS, &[acl_on(GROUP, "walpost", READ, DENY), acl_on(GROUP, "walpost", DESCRIBE, DENY)]);
    let walpost = outbox.relay_once(&[]);
    outbox.insert(1..=10);
    outbox.wait_until_confirmed();
    let denied = [acl(&topic, WRITE, DENY), acl(&topic, DESCRIBE, ALLOW), acl(&topic, READ, ALLOW)];
    ask(&kafka, CREATE_ACLS, &denied);
    outbox.insert(11..=20);
    let says = |text: &str| {
        wait_until(PATIENCE, text, || {
            let answer = walpost.get("/readyz");
            answer.status == 503 && answer.body.contains(text)
        });
    };
    // which topic it was, librdkafka does not say: the transaction has failed before a record was sent
    says("TopicAuthorizationFailed");
    ask(&kafka, DELETE_ACLS, &denied);
    outbox.wait_until_confirmed();
    walpost.wait_until_ready(PATIENCE);

    let id = outbox.progress_topic();
    let denied = [acl_on(TRANSACTIONAL_ID, &id, WRITE, DENY), acl_on(TRANSACTIONAL_ID, &id, DESCRIBE, ALLOW)];
    ask(&kafka, CREATE_ACLS, &denied);
    outbox.insert(21..=30);
    says("transactional.id");
    assert!(walpost.process().exit_status().is_none());
    ask(&kafka, DELETE_ACLS, &denied);
    outbox.wait_until_confirmed();
    walpost.wait_until_ready(PATIENCE);
    claim_once(&kafka.read_all(&[&topic]), 1..=30);
}

/// Case 36.
#[test]
fn a_topic_that_is_missing_is_waited_for() {
    let outbox = with_text_ids(Version::OLDEST);
    let known = outbox.topic("t", 1);
    let walpost = outbox.relay_once(&[]);
    outbox.execute(
        "INSERT INTO outbox SELECT n, CASE n WHEN 5 THEN 'late' ELSE 't' END, 'k', n FROM generate_series(1, 9) n",
    );
    wait_until(PATIENCE, "it says so", || walpost.get("/readyz").body.contains("late"));
    let late = outbox.topic("late", 1);
    outbox.wait_until_confirmed();
    claim_once(&outbox.kafka.read_all(&[&known, &late]), 1..=9);
}
