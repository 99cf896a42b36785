//! [`announce`]: the first record, written before the slot is created.
//!
//! Postgres cannot say whether a slot is new. So whoever creates one says so before: then a slot without a record is one whose
//! record was lost, and never a new one.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use rdkafka::producer::Producer;

use super::{
    progress::{Progress, may_create},
    trouble,
    writer::Writer,
};
use crate::{
    config::Config,
    sink::{Mode, Sending, SinkError, producer, reports::Reports, settings::transactional_config},
    source::whereabouts::Whereabouts,
};

/// Creates the progress topic where it is missing, and writes that nothing is published yet. Blocks until the brokers have it.
/// A record of an earlier slot of this name is a refusal, unless it is to be replaced.
pub fn announce(config: &Config, here: &Whereabouts, replace: bool) -> Result<(), SinkError> {
    let stop = Arc::new(AtomicBool::new(false));
    let written = write(config, here, replace, &stop);
    stop.store(true, Relaxed);
    written
}

fn write(config: &Config, here: &Whereabouts, replace: bool, stop: &Arc<AtomicBool>) -> Result<(), SinkError> {
    let (kafka, slot) = (&config.kafka, &config.postgres.slot);
    let sending = Sending { mode: Mode::Normal, batch_bytes: None, lets_go: false };
    let settings = transactional_config(kafka, sending, &format!("walpost-{slot}"));
    let producer =
        producer::start(&settings, false, (&Arc::new(Reports::default()), &Arc::default(), &Arc::default()), stop)?;
    let mut writer = Writer::new(kafka, slot, Arc::clone(&producer), Arc::default());
    let stored = writer.recover(true)?;
    let known = stored.as_ref().map(Option::as_ref).map_err(String::as_str);
    may_create(known, (here, slot, &kafka.progress_topic), replace)?;
    let begun = producer.begin_transaction();
    begun.map_err(|error| SinkError::Producer { code: trouble::name(&error) })?;
    let written = writer.commit(&Progress::none(here, slot).to_bytes());
    writer.close();
    written
}
