//! [`Finding`]s and the [`Report`] made of them.

use std::{borrow::Cow, fmt};

use serde::Serialize;

use super::catalog;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// It could not be looked at; no reason to doubt that `run` works.
    Unknown,
    /// `run` works now, and will not for ever, or harms something else.
    Warn,
    /// `run` would not deliver every event.
    Error,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Names it for machines.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What is the case.
    pub what: String,
    /// Why that matters; empty when all is well.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub why: Cow<'static, str>,
    /// What mends it; empty when all is well.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

/// Findings in the order in which they were made.
#[derive(Debug, Default)]
pub struct Findings(Vec<Finding>);

impl Findings {
    /// Notes that something is as it should be.
    pub fn ok(&mut self, code: &'static str, what: String) {
        self.0.push(Finding { code, severity: Severity::Ok, what, why: Cow::Borrowed(""), fix: String::new() });
    }

    /// Notes what may become a trouble.
    pub fn warn(
        &mut self,
        code: &'static str,
        what: String,
        why: impl Into<Cow<'static, str>>,
        fix: impl Into<String>,
    ) {
        self.note(Finding { code, severity: Severity::Warn, what, why: why.into(), fix: fix.into() });
    }

    /// Notes what could not be looked at, what is unknown for that, and what to grant.
    pub fn unknown(
        &mut self,
        code: &'static str,
        what: String,
        why: impl Into<Cow<'static, str>>,
        fix: impl Into<String>,
    ) {
        self.note(Finding { code, severity: Severity::Unknown, what, why: why.into(), fix: fix.into() });
    }

    /// Notes what keeps events from being delivered.
    pub fn error(
        &mut self,
        code: &'static str,
        what: String,
        why: impl Into<Cow<'static, str>>,
        fix: impl Into<String>,
    ) {
        self.note(Finding { code, severity: Severity::Error, what, why: why.into(), fix: fix.into() });
    }

    fn note(&mut self, finding: Finding) {
        debug_assert!(catalog::has(&finding), "{} stands in no list", finding.code);
        self.0.push(finding);
    }

    /// Adds findings that were made elsewhere.
    pub fn extend(&mut self, findings: Vec<Finding>) {
        self.0.extend(findings);
    }

    /// How many there are of at least this severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.0.iter().filter(|finding| finding.severity >= severity).count()
    }

    /// All of them.
    pub fn into_vec(self) -> Vec<Finding> {
        self.0
    }
}

/// What `walpost check` says; as JSON or, by `Display`, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `run` would work.
    pub ok: bool,
    /// What was looked at.
    pub findings: Vec<Finding>,
}

impl Report {
    pub(super) fn new(findings: Findings) -> Self {
        Self { ok: findings.count(Severity::Error) == 0, findings: findings.into_vec() }
    }

    /// 0 when `run` would work, else 1.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.ok)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { severity, what, why, fix, .. } in &self.findings {
            let mark = match severity {
                Severity::Ok => "ok   ",
                Severity::Unknown => "?    ",
                Severity::Warn => "warn ",
                Severity::Error => "ERROR",
            };
            writeln!(f, "{mark}  {what}")?;
            if !why.is_empty() {
                writeln!(f, "       why: {why}")?;
            }
            if !fix.is_empty() {
                writeln!(f, "       fix: {fix}")?;
            }
        }
        let number = |severity| self.findings.iter().filter(|finding| finding.severity == severity).count();
        let (errors, warnings) = (number(Severity::Error), number(Severity::Warn));
        let verdict = if self.ok { "walpost run would work" } else { "walpost run would not deliver every event" };
        write!(f, "errors: {errors}, warnings: {warnings}")?;
        match number(Severity::Unknown) {
            0 => writeln!(f, "; {verdict}"),
            unknown => writeln!(f, ", not looked at: {unknown}; {verdict}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_well_unless_something_is_an_error() {
        let mut findings = Findings::default();
        findings.ok("a", "all is well".into());
        findings.warn("slot_wal_unlimited", "the disk may fill".into(), "it stops the server", "limit it");
        let report = Report::new(findings);
        assert_eq!(report.exit_code(), 0);
        assert!(report.to_string().ends_with("errors: 0, warnings: 1; walpost run would work\n"), "{report}");
        let mut findings = Findings::default();
        findings.unknown("activity_unseen", "it is hidden".into(), "who knows", "grant it");
        let report = Report::new(findings);
        assert_eq!(report.exit_code(), 0);
        assert!(report.to_string().ends_with("warnings: 0, not looked at: 1; walpost run would work\n"), "{report}");
        let mut findings = Findings::default();
        findings.error("slot_lost", "it is gone".into(), "nothing works", "bring it back");
        let report = Report::new(findings);
        assert_eq!(report.exit_code(), 1);
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            r#"{"ok":false,"findings":[{"code":"slot_lost","severity":"error","what":"it is gone","why":"nothing works","fix":"bring it back"}]}"#
        );
    }
}
