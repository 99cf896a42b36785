//! A broker that is maltreated, by one test at a time.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::services::kafka::{Kafka, Settings};

static VICTIM: LazyLock<Mutex<Kafka>> = LazyLock::new(|| {
    // whoever has no ACL may do everything: the tests as well
    let settings = Settings::default()
        .proxied()
        .set("authorizer.class.name", "org.apache.kafka.metadata.authorizer.StandardAuthorizer")
        .set("allow.everyone.if.no.acl.found", "true");
    Mutex::new(Kafka::start(&settings))
});

/// Waits until no other test has it. It serves, and obeys ACLs.
pub fn victim() -> MutexGuard<'static, Kafka> {
    let was_left_alone = VICTIM.is_poisoned();
    let kafka = VICTIM.lock().unwrap_or_else(PoisonError::into_inner);
    if was_left_alone {
        // a test that failed may have left it in any state
        kafka.thaw();
        kafka.kill();
        kafka.start_again();
        VICTIM.clear_poison();
    }
    kafka
}
