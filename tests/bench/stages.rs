//! The hot path stage by stage, without servers: nanoseconds an event.

mod steady;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use steady::{Flight, IN_FLIGHT, PER_TRANSACTION, Stages, Transaction};

fn stages(criterion: &mut Criterion) {
    let transaction = Transaction::new();
    let mut group = criterion.benchmark_group("stages");
    group.throughput(Throughput::Elements(PER_TRANSACTION));
    group.bench_function("parse", |bencher| bencher.iter(|| transaction.parse()));
    let (rows, mut stages) = (transaction.rows(), Stages::new());
    group.bench_function("decode, route, encode", |bencher| bencher.iter(|| stages.encode(&rows)));
    let mut flight = Flight::new();
    group.throughput(Throughput::Elements(IN_FLIGHT));
    group.bench_function("track, seal, complete", |bencher| bencher.iter(|| flight.round()));
    group.finish();
}

criterion_group!(benches, stages);
criterion_main!(benches);
