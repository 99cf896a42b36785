//! [`TopicHandle`]: a topic resolved once, and records produced to it.
//!
//! The only `unsafe` of walpost. The safe way of the crate looks every topic up by name: a linear search under a lock,
//! 4.5 µs a record with a thousand topics, where the handle costs nothing (docs/decisions/0002). Every pointer given to
//! librdkafka here is either copied by it before the call returns (`RD_KAFKA_MSG_F_COPY`, header values) or owned by
//! [`TopicHandle`], which keeps the producer alive for as long as it lives.
#![expect(unsafe_code, reason = "topic handles: see the module's header and docs/decisions/0002")]

use std::{
    ffi::{CString, c_char, c_void},
    ptr::{self, NonNull},
    sync::Arc,
};

use rdkafka::{
    bindings::{self, rd_kafka_vtype_t, rd_kafka_vu_t},
    producer::{BaseProducer, Producer},
    types::RDKafkaErrorCode,
};

use super::reports::Context;
use crate::encode::{Headers, Record};

/// The producer of a session.
pub type SessionProducer = BaseProducer<Context>;

/// A topic of one producer.
pub struct TopicHandle {
    topic: NonNull<bindings::rd_kafka_topic_t>,
    producer: Arc<SessionProducer>,
}

// SAFETY: librdkafka's topic objects are reference-counted and may be used from any thread
// (https://docs.confluent.io/platform/current/clients/librdkafka/html/md_INTRODUCTION.html#threads-and-callbacks).
unsafe impl Send for TopicHandle {}

impl TopicHandle {
    /// Resolves a topic by name. `None` when librdkafka refuses the name.
    pub fn new(producer: &Arc<SessionProducer>, name: &str) -> Option<Self> {
        let name = CString::new(name).ok()?;
        // SAFETY: the client lives as long as `producer`; `name` outlives the call; NULL means default settings.
        let topic =
            unsafe { bindings::rd_kafka_topic_new(producer.client().native_ptr(), name.as_ptr(), ptr::null_mut()) };
        NonNull::new(topic).map(|topic| Self { topic, producer: Arc::clone(producer) })
    }

    /// Hands a record to the producer, which copies it. `word` comes back with its delivery report.
    pub fn produce(&self, record: &Record<'_>, word: usize) -> Result<(), RDKafkaErrorCode> {
        let headers = native_headers(record.headers);
        let mut arguments = [
            argument(rd_kafka_vtype_t::RD_KAFKA_VTYPE_RKT),
            argument(rd_kafka_vtype_t::RD_KAFKA_VTYPE_MSGFLAGS),
            argument(rd_kafka_vtype_t::RD_KAFKA_VTYPE_KEY),
            argument(rd_kafka_vtype_t::RD_KAFKA_VTYPE_VALUE),
            argument(rd_kafka_vtype_t::RD_KAFKA_VTYPE_TIMESTAMP),
            argument(rd_kafka_vtype_t::RD_KAFKA_VTYPE_OPAQUE),
            argument(rd_kafka_vtype_t::RD_KAFKA_VTYPE_HEADERS),
        ];
        arguments[0].u.rkt = self.topic.as_ptr();
        arguments[1].u.i = bindings::RD_KAFKA_MSG_F_COPY;
        arguments[2].u.mem = memory(record.key);
        arguments[3].u.mem = memory(record.value);
        arguments[4].u.i64_ = record.timestamp_ms;
        arguments[5].u.ptr = word as *mut c_void;
        arguments[6].u.headers = headers;
        // SAFETY: the client lives as long as `self.producer`; each argument's union field is the one that its type
        // names; key and value are borrowed for the call and copied by it; on success the headers are librdkafka's.
        let error = unsafe {
            bindings::rd_kafka_produceva(self.producer.client().native_ptr(), arguments.as_ptr(), arguments.len())
        };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: on failure the headers are still ours, and so is the error object; both are freed once.
        let code = unsafe {
            bindings::rd_kafka_headers_destroy(headers);
            let code = bindings::rd_kafka_error_code(error);
            bindings::rd_kafka_error_destroy(error);
            code
        };
        Err(code.into())
    }
}

/// Why a transaction was not committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotCommitted {
    /// The code.
    pub code: RDKafkaErrorCode,
    /// The same may be asked again: nothing was decided.
    pub is_retriable: bool,
}

/// Commits the transaction that is open, once all of it is acknowledged. Blocks; another thread must poll meanwhile. (The way of
/// the crate flushes by itself first, in steps of 100 ms.)
pub fn commit(producer: &SessionProducer) -> Result<(), NotCommitted> {
    const AS_LONG_AS_IT_MAY_TAKE: i32 = -1;
    // SAFETY: the client lives as long as `producer`; the error object, if any, is ours and freed once.
    unsafe {
        let error = bindings::rd_kafka_commit_transaction(producer.client().native_ptr(), AS_LONG_AS_IT_MAY_TAKE);
        if error.is_null() {
            return Ok(());
        }
        let (code, retriable) = (bindings::rd_kafka_error_code(error), bindings::rd_kafka_error_is_retriable(error));
        bindings::rd_kafka_error_destroy(error);
        Err(NotCommitted { code: code.into(), is_retriable: retriable != 0 })
    }
}

impl Drop for TopicHandle {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once, before the producer, which this handle keeps alive until here.
        unsafe { bindings::rd_kafka_topic_destroy(self.topic.as_ptr()) }
    }
}

fn argument(vtype: rd_kafka_vtype_t) -> rd_kafka_vu_t {
    bindings::rd_kafka_vu_s { vtype, u: bindings::rd_kafka_vu_s__bindgen_ty_1 { _pad: [0; 64] } }
}

/// NULL for no bytes at all, a valid pointer and size 0 for empty ones.
fn memory(bytes: Option<&[u8]>) -> bindings::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 {
    match bytes {
        None => bindings::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 { ptr: ptr::null_mut(), size: 0 },
        Some(bytes) => bindings::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 {
            ptr: bytes.as_ptr().cast_mut().cast(),
            size: bytes.len(),
        },
    }
}

fn native_headers(headers: &Headers) -> *mut bindings::rd_kafka_headers_t {
    // SAFETY: allocates a list, which the caller hands over or destroys.
    let list = unsafe { bindings::rd_kafka_headers_new(headers.len()) };
    for (name, value) in headers.iter() {
        // SAFETY: name and value are copied with the given lengths, which are those of live slices.
        unsafe {
            bindings::rd_kafka_header_add(
                list,
                name.as_ptr().cast::<c_char>(),
                name.len().cast_signed(),
                value.as_ptr().cast::<c_void>(),
                value.len().cast_signed(),
            );
        }
    }
    list
}
