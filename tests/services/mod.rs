//! Real servers for the tests: Postgres 14 to 18, Apache Kafka, and the walpost binary itself.
//!
//! Everything started here works in a folder below one run folder, and ends with the test process however that ends: a leash
//! waits for it (`leash.sh`). Shared servers start when the first test asks for them; a test that breaks a server starts its
//! own. Nothing here runs a server as root.
//!
//! All functions block and may be called from async tests as well.

pub mod account;
pub mod browser;
pub mod certificates;
pub mod collector;
pub mod database;
pub mod http;
pub mod kafka;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod run;
pub mod topics;
pub mod walpost;

use std::{
    future::Future,
    sync::{LazyLock, mpsc},
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;

/// How often a condition is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Drives the connections of the services, so that they live independent of a test's own runtime.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("services")
        .enable_all()
        .build()
        .expect("a runtime for the services")
});

/// Waits until `condition` is true; panics with `what` when it is not within `limit`.
pub fn wait_until(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(limit, what, || condition().then_some(()));
}

/// Waits until `probe` yields a value; panics with `what` when it does not within `limit`.
pub fn wait_for<T>(limit: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(start.elapsed() < limit, "waited {limit:?} in vain: {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Waits for a future that may borrow; callable from every thread that is in no runtime. The services' runtime drives the
/// connections meanwhile.
pub fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime").block_on(future)
}

/// Runs a future to its end on the services' runtime; callable from everywhere.
pub fn complete<F>(future: F) -> F::Output
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    RUNTIME.spawn(async move { sender.send(future.await) });
    receiver.recv().expect("the future runs to its end; see its panic above")
}
