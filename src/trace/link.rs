//! [`Link`]: the trace that an event belongs to, out of its `traceparent`.

/// A span of an application, as the header `traceparent` of an event names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    pub flags: u8,
}

impl Link {
    /// Reads a `traceparent` ([W3C Trace Context](https://www.w3.org/TR/trace-context/#traceparent-header)); `None` for what
    /// is none.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let legal = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte) || *byte == b'-';
        // of a version to come only what this one has is read
        let (known, more) = text.split_at_checked(55)?;
        let dashes = [2, 35, 52].iter().all(|at| known[*at] == b'-');
        if !dashes || !known.iter().all(legal) || more.first().is_some_and(|byte| *byte != b'-') {
            return None;
        }
        let version = part::<1>(&known[..2])?[0];
        if version == 0xFF || version == 0 && !more.is_empty() {
            return None;
        }
        let link =
            Self { trace_id: part(&known[3..35])?, span_id: part(&known[36..52])?, flags: part::<1>(&known[53..])?[0] };
        (link.trace_id != [0; 16] && link.span_id != [0; 8]).then_some(link)
    }
}

fn part<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    hex::decode_to_slice(text, &mut bytes).ok().map(|()| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_is_read() {
        let link = Link::parse(PARENT.as_bytes()).unwrap();
        assert_eq!(hex::encode(link.trace_id), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!((hex::encode(link.span_id).as_str(), link.flags), ("00f067aa0ba902b7", 1));
        let later = PARENT.replacen("00", "01", 1) + "-more";
        assert_eq!(Link::parse(later.as_bytes()), Some(link), "a version to come may have more");
    }

    #[test]
    fn what_is_no_traceparent_is_none() {
        for text in [
            String::new(),
            PARENT[..54].to_owned(),
            format!("{PARENT}0"),
            format!("{PARENT}-more"),
            PARENT.to_uppercase(),
            PARENT.replacen("00", "ff", 1),
            PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            PARENT.replace("00f067aa0ba902b7", &"0".repeat(16)),
            PARENT.replace('-', "0"),
            "é".repeat(30),
        ] {
            assert_eq!(Link::parse(text.as_bytes()), None, "{text}");
        }
    }
}
