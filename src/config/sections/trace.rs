//! `[trace]`: spans over OTLP.

use super::{super::TraceConfig, Section, text_or};
use crate::trace::Endpoint;

pub(super) fn trace(section: &mut Section<'_>) -> TraceConfig {
    let key = "otlp_endpoint";
    let endpoint = section.text(key).and_then(|text| match Endpoint::parse(&text.value) {
        Ok(endpoint) => Some(endpoint),
        Err(error) => {
            section.fault(&text.at, key, error.to_string(), error.remedy());
            None
        }
    });
    let service_name = text_or(section, "service_name", "walpost").value;
    let one_in = section.integer("one_in", 1, &(1..=1_000_000)).value;
    TraceConfig { otlp_endpoint: endpoint, service_name, one_in: u32::try_from(one_in).unwrap_or(1) }
}
