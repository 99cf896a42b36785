//! Faults, chosen by a seed.

use std::{
    collections::BTreeMap,
    fmt, thread,
    time::{Duration, Instant},
};

use fastrand::Rng;
use nix::sys::signal::Signal;

use crate::{
    services::{kafka::Node, postgres::Stop, proxy::Weather, walpost::Walpost},
    world::World,
};

/// Where walpost can be told to kill itself.
const POINTS: [&str; 10] = [
    "after_receive",
    "after_decode",
    "after_enqueue",
    "after_send",
    "after_ack",
    "before_status",
    "after_status",
    "in_reconnect",
    "in_rebuild",
    "in_shutdown",
];
/// And where else under exactly-once delivery.
const POINTS_ONCE: [&str; 4] = ["after_fence", "after_progress", "before_commit", "after_commit"];
/// Where a process may be stopped that goes on when another has taken its place.
const ZOMBIE_POINTS: [&str; 7] = [
    "after_fence",
    "after_progress",
    "after_enqueue",
    "before_commit",
    "after_commit",
    "before_status",
    "after_status",
];
/// How long a fault point may take to be passed.
const POINT_LIMIT: Duration = Duration::from_secs(8);

#[derive(Debug, Clone, Copy)]
enum Fault {
    KillAtPoint,
    Kill,
    Terminate,
    FreezeWalpost,
    FreezeBroker,
    KillBroker,
    RestartPostgres(Stop),
    EndWalsender,
    EndSqlLink,
    CutPostgresLink,
    CutKafkaLink,
    PostgresLink(Weather),
    KafkaLink(Weather),
}

const DELAY: Weather = Weather::Delayed(Duration::from_millis(200));

/// Kills at fault points as often as all others together.
const MENU: [Fault; 24] = [
    Fault::Kill,
    Fault::Terminate,
    Fault::FreezeWalpost,
    Fault::FreezeBroker,
    Fault::KillBroker,
    Fault::RestartPostgres(Stop::Immediate),
    Fault::RestartPostgres(Stop::Fast),
    Fault::EndWalsender,
    Fault::EndSqlLink,
    Fault::CutPostgresLink,
    Fault::CutKafkaLink,
    Fault::PostgresLink(Weather::Stalled),
    Fault::PostgresLink(Weather::CutBeforeAnswer),
    Fault::PostgresLink(Weather::HalfOpen),
    Fault::PostgresLink(Weather::Dripping),
    Fault::PostgresLink(DELAY),
    Fault::PostgresLink(Weather::Refusing),
    Fault::KafkaLink(Weather::Stalled),
    Fault::KafkaLink(Weather::CutBeforeAnswer),
    Fault::KafkaLink(Weather::HalfOpen),
    Fault::KafkaLink(Weather::Dripping),
    Fault::KafkaLink(DELAY),
    Fault::KafkaLink(Weather::Refusing),
    Fault::Kill,
];

/// The sequence of faults that a seed stands for, and how many there were.
pub struct Faults {
    seed: u64,
    random: Rng,
    counts: BTreeMap<String, u32>,
    rounds: u32,
    /// The only broker is not killed.
    spares_single_broker: bool,
}

impl Faults {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, random: Rng::with_seed(seed), counts: BTreeMap::new(), rounds: 0, spares_single_broker: false }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The same without a kill of the only broker.
    pub fn sparing_single_broker(self) -> Self {
        Self { spares_single_broker: true, ..self }
    }

    /// One fault, and a moment of peace.
    pub fn round(&mut self, world: &World) {
        self.rounds += 1;
        if self.random.bool() {
            world.new_topic();
        }
        if world.shared.once && self.random.u8(..8) == 0 {
            let name = self.zombie(world);
            *self.counts.entry(name).or_default() += 1;
            return;
        }
        let fault = if self.random.bool() { Fault::KillAtPoint } else { MENU[self.random.usize(..MENU.len())] };
        let fault = match fault {
            // brokers themselves fail then: see docs/exactly-once.md
            Fault::KillBroker if self.spares_single_broker && world.shared.kafka.nodes().len() == 1 => Fault::Kill,
            fault => fault,
        };
        let hold = match fault {
            Fault::FreezeBroker => self.random.u64(2000..8000),
            _ => self.random.u64(300..4000),
        };
        let hold = Duration::from_millis(hold);
        let peace = Duration::from_millis(self.random.u64(100..1200));
        let name = match fault {
            Fault::KillAtPoint => self.kill_at_point(world),
            fault => {
                self.inflict(world, fault, hold);
                format!("{fault:?}")
            }
        };
        *self.counts.entry(name).or_default() += 1;
        world.run_walpost();
        thread::sleep(peace);
    }

    fn kill_at_point(&mut self, world: &World) -> String {
        let points = [&POINTS[..], if world.shared.once { &POINTS_ONCE } else { &[] }].concat();
        let point = points[self.random.usize(..points.len())];
        let most = match point {
            "after_receive" | "after_decode" | "after_enqueue" | "after_send" | "after_ack" => 400,
            "before_status" | "after_status" | "before_commit" | "after_commit" => 6,
            "after_fence" | "after_progress" => 1,
            _ => 2,
        };
        let times = self.random.u64(1..=most);
        world.replace_walpost(&[("CRASH_KILL", &format!("{point}:{times}"))]);
        let since = Instant::now();
        while !world.walpost_has_ended() {
            if since.elapsed() > POINT_LIMIT {
                world.with_walpost(Walpost::kill9);
                return format!("kill, {point} not reached");
            }
            thread::sleep(Duration::from_millis(400));
            match point {
                "in_reconnect" | "in_rebuild" => end_walsender(world),
                "in_shutdown" => world.signal(Signal::SIGTERM),
                _ => {}
            }
        }
        format!("kill {point}")
    }

    /// Stops walpost where it stands, lets another take its place, and lets it go on.
    fn zombie(&mut self, world: &World) -> String {
        let point = ZOMBIE_POINTS[self.random.usize(..ZOMBIE_POINTS.len())];
        let times = if point == "after_fence" || point == "after_progress" { 1 } else { self.random.u64(1..=6) };
        world.replace_walpost(&[("CRASH_STOP", &format!("{point}:{times}"))]);
        let since = Instant::now();
        while !world.with_walpost(|walpost| walpost.process().is_frozen()) {
            if since.elapsed() > POINT_LIMIT {
                world.with_walpost(Walpost::freeze);
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        end_walsender(world);
        let zombie = world.second_walpost().expect("it was started above");
        thread::sleep(Duration::from_millis(self.random.u64(300..3000)));
        zombie.thaw();
        thread::sleep(Duration::from_millis(self.random.u64(300..2000)));
        zombie.kill9();
        format!("zombie {point}")
    }

    fn inflict(&mut self, world: &World, fault: Fault, hold: Duration) {
        let nodes = world.shared.kafka.nodes();
        let node = &nodes[self.random.usize(..nodes.len())];
        match fault {
            Fault::KillAtPoint => {}
            Fault::Kill => world.with_walpost(Walpost::kill9),
            Fault::Terminate => {
                world.signal(Signal::SIGTERM);
                thread::sleep(hold);
                world.signal(Signal::SIGKILL);
            }
            Fault::FreezeWalpost => {
                world.with_walpost(Walpost::freeze);
                thread::sleep(hold);
                world.with_walpost(Walpost::thaw);
            }
            Fault::FreezeBroker => {
                node.freeze();
                self.perhaps_kill(world, hold);
                node.thaw();
            }
            Fault::KillBroker => {
                node.kill();
                self.perhaps_kill(world, hold);
                node.start_again();
                world.shared.kafka.wait_until_up();
            }
            Fault::RestartPostgres(mode) => {
                world.shared.postgres.stop(mode);
                world.shared.postgres.start_again();
            }
            Fault::EndWalsender => end_walsender(world),
            Fault::EndSqlLink => run_sql(
                world,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'walpost%' \
                 AND backend_type = 'client backend'",
            ),
            Fault::CutPostgresLink => world.postgres_link.cut(),
            Fault::CutKafkaLink => node.proxy().cut(),
            Fault::PostgresLink(weather) => {
                world.postgres_link.set(weather);
                self.perhaps_kill(world, hold);
                world.postgres_link.set(Weather::Clear);
                if weather == Weather::HalfOpen {
                    world.postgres_link.cut();
                }
            }
            Fault::KafkaLink(weather) => {
                node.proxy().set(weather);
                self.perhaps_kill(world, hold);
                node.proxy().set(Weather::Clear);
                heal_half_open(node, weather);
            }
        }
    }

    /// In one of three cases walpost dies in the middle of it.
    fn perhaps_kill(&mut self, world: &World, hold: Duration) {
        thread::sleep(hold);
        if self.random.u8(..3) == 0 {
            world.with_walpost(Walpost::kill9);
        }
    }
}

fn heal_half_open(node: &Node, weather: Weather) {
    if weather == Weather::HalfOpen {
        node.proxy().cut();
    }
}

fn end_walsender(world: &World) {
    run_sql(world, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active");
}

fn run_sql(world: &World, sql: &'static str) {
    if let Some(client) = world.shared.connect() {
        let _ = crate::services::complete(async move { client.batch_execute(sql).await });
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<44}{:>6}", "rounds", self.rounds)?;
        for (name, count) in &self.counts {
            writeln!(f, "{name:<44}{count:>6}")?;
        }
        Ok(())
    }
}
