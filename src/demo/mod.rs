//! `walpost demo`: the whole story on this machine, with the real binary and a real Postgres.
//!
//! Owns a private cluster, a broker, a shop that writes, and an audience that consumes; kills the tailer on the way, and
//! judges at the end. It asserts what it prints: the exit code is 0 only when every promise was kept. Everything that it
//! starts or writes is gone when it is, however it ends (see `leash`); it reads nothing of the configuration and of the
//! environment only what concerns the terminal and where programs and temporary files are.

mod account;
mod audience;
mod book;
mod broker;
mod chapter;
mod cluster;
mod desk;
mod error;
mod judge;
mod leash;
mod lesson;
mod naive;
mod relay;
mod report;
mod shop;

use std::{fs, fs::File, io, path::Path, time::Duration};

use tokio::{
    sync::{mpsc::unbounded_channel, watch},
    task::JoinHandle,
    time::Instant,
};
use tokio_postgres::Client;

pub use self::error::DemoError;
use self::{
    account::Account as UnixAccount,
    audience::{Audience, Reader},
    book::{Book, Tally},
    broker::Broker,
    chapter::Chapter,
    cluster::Cluster,
    desk::Desk,
    judge::{judge, latency},
    leash::Leash,
    lesson::Lesson,
    relay::{Recipe, Relay},
    report::{Account, Screen, millis, say, thousands},
    shop::{CUSTOMERS, EVENT_TYPES, ROLLED_BACK, Shop, WRITERS},
};

/// The topic of the first chapter.
const NAIVE_TOPIC: &str = "naive";
const LONG_RUN_TITLE: &str = "All of it at once, and death at no special moment";
const ROLES: &str = include_str!("../../sql/roles.sql");
/// How long the story may wait for anything to happen.
const LIMIT: Duration = Duration::from_secs(20);
/// How long things are watched while nothing is done to them.
const WATCH: Duration = Duration::from_secs(6);
/// How long the first contact with each topic may disturb the measurement, and how long before the kill it ends, so that
/// what was in flight then is not in it.
const MARGIN: Duration = Duration::from_secs(1);
/// How long the tailer stays away, and how much longer at most until this many events have piled up: a busy disk may take
/// seconds for a commit.
const PAUSE: Duration = Duration::from_secs(2);
const LONGER: Duration = Duration::from_secs(6);
const PILE: usize = 200;
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The number of the long run, behind the chapters of the lesson.
pub const LONG_RUN: u8 = *lesson::CHAPTERS.end() + 1;

/// How the story is told.
#[derive(Debug, Clone, Copy, Default)]
pub struct Telling<'a> {
    /// A real Kafka instead of the one in this process.
    pub brokers: Option<&'a str>,
    /// Only this chapter.
    pub chapter: Option<u8>,
    /// Print nothing but the numbers, as JSON.
    pub json: bool,
}

/// Tells the story. The exit code is 0 when every promise was kept, else 1.
pub fn run(telling: Telling<'_>) -> Result<u8, DemoError> {
    let runtime = runtime()?;
    if telling.json {
        report::silence();
    }
    let screen = Screen::new();
    let account = UnixAccount::for_server()?;
    let leash = Leash::new(account)?;
    let outcome = runtime.block_on(async {
        let interrupted = interrupted()?;
        tokio::pin!(interrupted);
        let topics: Vec<&str> = EVENT_TYPES.into_iter().chain([NAIVE_TOPIC]).chain(lesson::TOPICS).collect();
        let broker = Broker::start(telling.brokers, &topics).await?;
        // an interruption first: it must not wait for a story that has hung itself up
        let outcome = tokio::select! {
            biased;
            () = &mut interrupted => Err(DemoError::Interrupted),
            outcome = story(screen, &leash, (account, telling.chapter), &broker) => outcome,
        };
        broker.close().await;
        outcome
    });
    drop(leash);
    let chapters = outcome?;
    let holds = chapters.iter().all(Chapter::holds);
    if telling.json {
        report::print_json(&chapters);
    } else {
        screen.verdict(holds);
    }
    Ok(u8::from(!holds))
}

/// The order desk of the lesson, in a process of its own: works until it dies, or has no more orders. `desk` is one of the
/// desks' names.
pub fn order_desk(desk: &str, conninfo: &str, brokers: &str, told: &str, first: i32) -> Result<u8, DemoError> {
    let desk = Desk::named(desk).ok_or(DemoError::Gone("order desk of that name"))?;
    runtime()?.block_on(desk::work(desk, conninfo, brokers, told, first)).map(|()| 0)
}

/// The shop of the first chapter, in a process of its own: writes until it is killed.
pub fn naive_shop(conninfo: &str, brokers: &str, topic: &str) -> Result<u8, DemoError> {
    runtime()?.block_on(naive::shop(conninfo, brokers, topic)).map(|()| 0)
}

fn runtime() -> Result<tokio::runtime::Runtime, DemoError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.map_err(DemoError::io("start the runtime"))
}

/// Comes with the first SIGINT, SIGTERM or SIGHUP; they are caught from this call on.
fn interrupted() -> Result<impl Future<Output = ()>, DemoError> {
    use tokio::signal::unix::{SignalKind, signal};
    let listen = |kind| signal(kind).map_err(DemoError::io("listen for signals"));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    })
}

async fn story(
    screen: Screen,
    leash: &Leash,
    (account, chosen): (Option<UnixAccount>, Option<u8>),
    broker: &Broker,
) -> Result<Vec<Chapter>, DemoError> {
    screen.heading("walpost demo: a shop, its outbox, and a tailer that is killed on the way");
    let cluster = Cluster::start(leash.folder(), account).await?;
    say(&format!("Postgres {} in {} (fsync on)", cluster.version(), leash.folder().display()));
    say(&format!("Kafka: {}", broker.describe()));
    let superuser = cluster.connect("postgres").await?;
    let owner = Recipe::new(leash.folder(), environment(&cluster, broker, "postgres"))?;
    let relay = Recipe::new(leash.folder(), environment(&cluster, broker, "walpost_relay"))?;
    for step in owner.run(&["init"]).await?.lines() {
        say(&format!("walpost init: {step}"));
    }
    superuser.batch_execute(ROLES).await.map_err(DemoError::sql("create the roles"))?;
    Shop::furnish(&superuser).await?;

    let lesson = Lesson { screen, cluster: &cluster, superuser: &superuser, broker, relay: &relay };
    let mut chapters = lesson.tell(chosen).await?;
    if chosen.is_none_or(|chosen| chosen == LONG_RUN) {
        screen.heading(&format!("{LONG_RUN}. {LONG_RUN_TITLE}"));
        dual_write(screen, (&cluster, &superuser), broker, &owner).await?;
        let stage = Stage::set(screen, (&cluster, superuser), broker, relay)?;
        let account = stage.play(&cluster, broker).await?;
        chapters.push(Chapter { number: LONG_RUN, title: LONG_RUN_TITLE, rows: account.rows() });
    }
    Ok(chapters)
}

/// Only what is needed; everything else is as it comes.
fn environment(cluster: &Cluster, broker: &Broker, user: &str) -> Vec<(&'static str, String)> {
    vec![
        ("WALPOST_POSTGRES_URL", cluster.conninfo(user)),
        ("WALPOST_KAFKA_BROKERS", broker.brokers.clone()),
        ("WALPOST_ROUTE_TOPIC", broker.topic("{event_type}")),
        ("WALPOST_HTTP_LISTEN", String::new()),
    ]
}

async fn dual_write(
    screen: Screen,
    postgres: (&Cluster, &Client),
    broker: &Broker,
    recipe: &Recipe,
) -> Result<(), DemoError> {
    screen.heading("   A naive shop");
    say(&format!("A naive shop: {WRITERS} writers, each commits an order, then sends its event to Kafka and"));
    say("waits for the acknowledgement. Its process is killed (SIGKILL) at a moment of no");
    say(&format!("special choice, {} times.", naive::KILLS));
    let outcome = naive::observe(postgres, broker, &broker.topic(NAIVE_TOPIC), recipe).await?;
    let (orders, lost) = (thousands(outcome.orders), thousands(outcome.lost));
    screen.turn(&format!("{orders} orders in the database, {lost} of them without an event, for ever"));
    Ok(())
}

/// Everything that takes part from the second chapter on.
struct Stage {
    screen: Screen,
    superuser: Client,
    recipe: Recipe,
    tally: watch::Receiver<Tally>,
    book: JoinHandle<Book>,
    audience: Audience,
    notes: tokio::sync::mpsc::UnboundedSender<book::Note>,
}

impl Stage {
    fn set(
        screen: Screen,
        (_, superuser): (&Cluster, Client),
        broker: &Broker,
        recipe: Recipe,
    ) -> Result<Self, DemoError> {
        let (notes, inbox) = unbounded_channel();
        let (tell, tally) = watch::channel(Tally::default());
        let topics = EVENT_TYPES.map(|event_type| broker.topic(event_type));
        let screen = screen.with_topics(&topics);
        let audience = Audience::start(Reader::new(broker, &topics)?, notes.clone())?;
        let book = tokio::spawn(Book::keep(inbox, tell, screen));
        Ok(Self { screen, superuser, recipe, tally, book, audience, notes })
    }

    async fn play(mut self, cluster: &Cluster, broker: &Broker) -> Result<Account, DemoError> {
        let screen = self.screen;
        screen.heading("   The outbox: order and events in one transaction");
        say(&format!(
            "{WRITERS} writers, {CUSTOMERS} customers; one transaction in {ROLLED_BACK} is rolled back after its"
        ));
        say("events were written. A few of the events, as they arrive:");
        let relay = self.start_relay().await?;
        screen.event_heading();
        let shop = Shop::open(cluster, &self.notes, broker.prefix()).await?;
        let opened = Instant::now();
        tokio::time::sleep(WATCH).await;

        screen.heading("   kill -9, twice");
        let undisturbed = opened + MARGIN..Instant::now() - MARGIN;
        let relay = self.kill_and_restart(relay).await?;
        tokio::time::sleep(WATCH / 2).await;

        screen.heading("   A clean stop");
        let (relay, twice_after_kills) = self.stop_and_restart(relay).await?;
        tokio::time::sleep(WATCH / 2).await;

        shop.close().await?;
        // if this is in vain, the table shows what is missing
        let _ = self.until("everything arrived", |tally| tally.missing() == 0).await;
        relay.stop().await?;
        let Tally { rolled_back, twice, .. } = self.audience.catch_up().await?;
        let book = self.close_book().await?;
        let account = Account {
            verdict: judge(&book.written, &book.arrivals),
            rolled_back,
            twice_after_stop: twice - twice_after_kills,
            undisturbed: latency(&book.written, &book.arrivals, |event| undisturbed.contains(&event.committing)),
            overall: latency(&book.written, &book.arrivals, |_| true),
        };
        screen.heading("   The account");
        screen.table(&account);
        Ok(account)
    }

    async fn kill_and_restart(&mut self, relay: Relay) -> Result<Relay, DemoError> {
        let screen = self.screen;
        self.until("events were in flight", |tally| tally.missing() > 1).await?;
        relay.kill9().await?;
        let missing = self.audience.catch_up().await?.missing();
        screen
            .turn(&format!("SIGKILL. {} committed events are not in Kafka yet; the shop goes on", thousands(missing)));
        let before = self.pile_up(PAUSE).await;
        let relay = self.start_relay().await?;
        self.until("events came again", |tally| tally.delivered > before.delivered).await?;
        relay.kill9().await?;
        let after = self.audience.catch_up().await?;
        screen.turn(&format!(
            "{} had piled up. SIGKILL again, while it catches up: {} to go",
            thousands(before.missing()),
            thousands(after.missing())
        ));
        let relay = self.start_relay().await?;
        self.until("it had caught up", |tally| tally.missing() < 5).await?;
        let twice = self.audience.catch_up().await?.twice;
        screen.turn(&format!("caught up; {} events were sent twice so far", thousands(twice)));
        Ok(relay)
    }

    /// The number of events sent twice before the restart comes with it.
    async fn stop_and_restart(&mut self, relay: Relay) -> Result<(Relay, usize), DemoError> {
        let screen = self.screen;
        let began = Instant::now();
        relay.stop().await?;
        screen.turn(&format!("SIGTERM: exit code 0 after {}", millis(began.elapsed())));
        // nobody sends now: all that arrives twice from here on was sent twice because of this stop
        let before = self.audience.catch_up().await?;
        self.pile_up(PAUSE / 2).await;
        let relay = self.start_relay().await?;
        self.until("it had caught up", |tally| tally.missing() < 5).await?;
        let after = self.audience.catch_up().await?;
        let (arrived, twice) = (after.delivered - before.delivered, after.twice - before.twice);
        screen.turn(&format!("caught up: {} events since, {twice} of them sent twice", thousands(arrived)));
        Ok((relay, before.twice))
    }

    /// Lets the shop write for `pause` while nobody sends.
    async fn pile_up(&mut self, pause: Duration) -> Tally {
        tokio::time::sleep(pause).await;
        // fewer will do where the disk is that slow
        let _ = tokio::time::timeout(LONGER, self.tally.wait_for(|tally| tally.missing() >= PILE)).await;
        *self.tally.borrow()
    }

    async fn start_relay(&self) -> Result<Relay, DemoError> {
        let began = Instant::now();
        let relay = stream(&self.recipe, &self.superuser).await?;
        self.screen.turn(&format!("walpost run: streaming after {}", millis(began.elapsed())));
        Ok(relay)
    }

    async fn until(&mut self, what: &'static str, condition: impl Fn(&Tally) -> bool) -> Result<Tally, DemoError> {
        match tokio::time::timeout(LIMIT, self.tally.wait_for(condition)).await {
            Err(_) => Err(DemoError::InVain { what, log: tail(&self.recipe.log()) }),
            Ok(Err(_)) => Err(DemoError::Gone("book")),
            Ok(Ok(tally)) => Ok(*tally),
        }
    }

    /// The book, when its last writer is gone.
    async fn close_book(self) -> Result<Book, DemoError> {
        drop((self.notes, self.audience));
        self.book.await.map_err(|_| DemoError::Gone("book"))
    }
}

/// Starts the tailer and waits until it streams.
async fn stream(recipe: &Recipe, superuser: &Client) -> Result<Relay, DemoError> {
    const ACTIVE: &str = "SELECT FROM pg_replication_slots WHERE slot_name = 'walpost' AND active";
    let active = || async {
        let row = superuser.query_opt(ACTIVE, &[]).await.map_err(DemoError::sql("look at the slot"))?;
        Ok::<_, DemoError>(row.is_some())
    };
    let began = Instant::now();
    // the server may not know yet that the last one is dead
    while active().await? && began.elapsed() < LIMIT {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let mut relay = recipe.start(&["run"])?;
    while !active().await? {
        relay.must_run()?;
        if began.elapsed() > LIMIT {
            return Err(DemoError::InVain { what: "walpost streamed", log: tail(&recipe.log()) });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(relay)
}

/// How many rows there are; `what` stands behind FROM.
async fn count(client: &Client, what: &str) -> Result<usize, DemoError> {
    let row = client.query_one(&format!("SELECT count(*) FROM {what}"), &[]).await;
    let count: i64 = row.map_err(DemoError::sql(format!("count the rows of {what}")))?.get(0);
    Ok(usize::try_from(count).unwrap_or_default())
}

/// A log to append to, for standard output and standard error.
fn open_log(path: &Path) -> Result<(File, File), DemoError> {
    let open = || -> io::Result<(File, File)> {
        let file = File::options().create(true).append(true).open(path)?;
        let other = file.try_clone()?;
        Ok((file, other))
    };
    open().map_err(DemoError::io(format!("open {}", path.display())))
}

/// The last lines of a log.
fn tail(path: &Path) -> String {
    const LINES: usize = 12;
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
