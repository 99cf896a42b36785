//! Error code → what to do. One match; the only place that knows the codes.

use rdkafka::types::RDKafkaErrorCode as Code;

/// What a failed delivery means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// An operator can mend it (a missing topic, a denied write): wait and try again.
    Wait,
    /// Something in the batch is refused: find the record.
    Suspect,
    /// A consequence of another failure, says nothing by itself.
    Consequence,
    /// The producer is of no more use: make a new one and resume from the slot.
    Rebuild,
}

/// Judges the code of a delivery report. What librdkafka retries by itself, forever, never comes here.
pub fn judge(code: Code) -> Verdict {
    match code {
        Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownPartition
        | Code::TopicAuthorizationFailed
        | Code::ClusterAuthorizationFailed
        | Code::TransactionalIdAuthorizationFailed
        | Code::SaslAuthenticationFailed
        | Code::Authentication
        | Code::NotEnoughReplicas
        | Code::NotEnoughReplicasAfterAppend
        | Code::InvalidRequiredAcks
        | Code::InvalidReplicationFactor => Verdict::Wait,
        Code::MessageSizeTooLarge
        | Code::InvalidMessage
        | Code::InvalidMessageSize
        | Code::InvalidRecord
        | Code::InvalidTimestamp
        | Code::InvalidTopic
        | Code::MessageBatchTooLarge
        | Code::PolicyViolation
        | Code::UnsupportedForMessageFormat
        | Code::UnsupportedCompressionType => Verdict::Suspect,
        Code::PurgeQueue
        | Code::PurgeInflight
        | Code::InvalidDifferentRecord
        | Code::Fatal
        | Code::GaplessGuarantee => Verdict::Consequence,
        _ => Verdict::Rebuild,
    }
}

/// The code's stable name, for metrics and logs: `MSG_SIZE_TOO_LARGE` and the like.
pub fn name(code: Code) -> String {
    // the variant's name; texts of librdkafka may change with its version
    format!("{code:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operator_can_mend_is_never_poison() {
        for code in [Code::UnknownTopicOrPartition, Code::TopicAuthorizationFailed, Code::NotEnoughReplicas] {
            assert_eq!(judge(code), Verdict::Wait);
        }
        assert_eq!(judge(Code::MessageSizeTooLarge), Verdict::Suspect);
        assert_eq!(judge(Code::OutOfOrderSequenceNumber), Verdict::Rebuild);
        assert_eq!(judge(Code::PurgeQueue), Verdict::Consequence);
    }
}
