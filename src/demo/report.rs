//! [`Screen`]: what a person reads. Whole lines only, so that a log reads like a terminal; colour on a terminal alone.

use std::{
    env,
    io::{self, IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    chapter::{Chapter, Expected, Row},
    judge::{Latency, Verdict, Written},
};

/// Nothing of the story is printed.
static SILENT: AtomicBool = AtomicBool::new(false);

/// From now on only [`print_json`] prints.
pub fn silence() {
    SILENT.store(true, Relaxed);
}

/// The chapters as a JSON document.
pub fn print_json(chapters: &[Chapter]) {
    let holds = chapters.iter().all(Chapter::holds);
    let document = serde_json::json!({ "holds": holds, "chapters": chapters });
    let _ = writeln!(io::stdout(), "{document:#}");
}

/// Writes lines to standard output. A reader who went away is no reason to stop.
#[derive(Debug, Clone, Copy)]
pub struct Screen {
    colour: bool,
    began: Instant,
    topic_width: usize,
}

/// How a piece of text stands out.
#[derive(Debug, Clone, Copy)]
enum Style {
    Bold,
    Dim,
    Good,
    Bad,
}

impl Screen {
    /// Colours where a terminal is and nobody objects (<https://no-color.org>).
    pub fn new() -> Self {
        let objection = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = env::var_os("TERM").is_none_or(|terminal| terminal == "dumb");
        Self { colour: io::stdout().is_terminal() && !objection && !dumb, began: Instant::now(), topic_width: 0 }
    }

    /// Makes room for these topics.
    pub fn with_topics(self, topics: &[String]) -> Self {
        Self { topic_width: topics.iter().map(String::len).max().unwrap_or(0), ..self }
    }

    /// A heading.
    pub fn heading(self, text: &str) {
        line("");
        line(&self.styled(Style::Bold, text));
    }

    /// A turn of the story, with the time since the beginning.
    pub fn turn(self, text: &str) {
        line(&self.styled(Style::Bold, &format!("   {} {text}", self.clock())));
    }

    /// The heading of events.
    pub fn event_heading(self) {
        let text = format!("   {:>8} {:<2$}   key           COMMIT to consumer", "", "topic", self.topic_width);
        line(&self.styled(Style::Dim, &text));
    }

    /// An event that has arrived.
    pub fn event(self, event: &Written, wait: Duration) {
        let (clock, wait) = (self.clock(), millis(wait));
        let Written { topic, key, .. } = event;
        line(&format!("   {clock} {topic:<width$}   {key:<13} {wait:>18}", width = self.topic_width));
    }

    /// The table at the end.
    pub fn table(self, account: &Account) {
        let Account { verdict, rolled_back, twice_after_stop, .. } = account;
        self.number("written (committed)", verdict.written, "");
        self.number("rolled back on purpose", *rolled_back, "");
        self.number("delivered", verdict.delivered, "");
        self.promise("lost", verdict.lost, "must be 0");
        self.promise("out of order per key", verdict.inversions, "must be 0, by first deliveries");
        self.promise("phantom", verdict.phantoms, "must be 0: rolled back, and yet published");
        self.promise("altered", verdict.altered, "must be 0: in topic, key or payload");
        self.number("sent twice", verdict.twice, "by the kills; the header `id` tells");
        self.promise("  after the clean stop", *twice_after_stop, "must be 0");
        line("");
        say("From the writer's COMMIT to the record at the consumer, both in this process; so the");
        say("disk's flush and the consumer's own polling are in it:");
        self.latency("before the kills", &account.undisturbed);
        self.latency("all", &account.overall);
    }

    /// A number of the lesson, and what it has to be.
    pub fn measured(self, row: &Row) {
        let Row { what, measured, expected, holds } = row;
        let style = if *holds { Style::Good } else { Style::Bad };
        let text = self.styled(style, &format!("   {what:<46} {measured:>4}"));
        let remark = if *expected == Expected::Any { String::new() } else { format!("must be {expected}") };
        line(format!("{text}   {}", self.styled(Style::Dim, &remark)).trim_end());
    }

    /// The last line.
    pub fn verdict(self, holds: bool) {
        line("");
        if holds {
            line(&self.styled(Style::Good, "Nothing lost, nothing invented, nothing out of order."));
        } else {
            line(&self.styled(Style::Bad, "A promise was broken: see the rows that are not what they must be."));
        }
    }

    fn number(self, name: &str, number: usize, remark: &str) {
        let text = format!("   {name:<24} {:>8}", thousands(number));
        line(format!("{text}   {}", self.styled(Style::Dim, remark)).trim_end());
    }

    /// A number that must be 0.
    fn promise(self, name: &str, number: usize, remark: &str) {
        let style = if number == 0 { Style::Good } else { Style::Bad };
        let text = self.styled(style, &format!("   {name:<24} {:>8}", thousands(number)));
        line(&format!("{text}   {}", self.styled(Style::Dim, remark)));
    }

    fn latency(self, name: &str, latency: &Latency) {
        let Latency { events, median, p99, longest } = *latency;
        let [median, p99, longest] = [median, p99, longest].map(millis);
        let figures = format!("median {median}, p99 {p99}, longest {longest}");
        let events = self.styled(Style::Dim, &format!("({} events)", thousands(events)));
        line(&format!("     {name:<18} {figures} {events}"));
    }

    fn clock(self) -> String {
        format!("{:>6.1} s", self.began.elapsed().as_secs_f64())
    }

    fn styled(self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Bold => "1",
            Style::Dim => "2",
            Style::Good => "32",
            Style::Bad => "1;31",
        };
        if self.colour && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A line of the story.
pub fn say(text: &str) {
    line(&format!("   {text}"));
}

fn line(text: &str) {
    if SILENT.load(Relaxed) {
        return;
    }
    // one write, so that lines of different threads never mix
    let _ = io::stdout().write_all(format!("{text}\n").as_bytes());
}

/// What the demo comes to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// The comparison.
    pub verdict: Verdict,
    /// Events that were rolled back.
    pub rolled_back: usize,
    /// Records sent again after a stop that was clean.
    pub twice_after_stop: usize,
    /// Of the events before the first kill, without those of the very beginning.
    pub undisturbed: Latency,
    /// Of all events.
    pub overall: Latency,
}

impl Account {
    /// As numbers of a chapter.
    pub fn rows(&self) -> Vec<Row> {
        let Verdict { written, delivered, lost, twice: _, inversions, phantoms, altered } = self.verdict;
        let nothing = |what, number| Row::new(what, number, Expected::Exactly(0));
        vec![
            Row::new("events written", written, Expected::AtLeast(1)),
            Row::new("events delivered", delivered, Expected::Exactly(written)),
            nothing("lost", lost),
            nothing("out of order per key", inversions),
            nothing("phantom", phantoms),
            nothing("altered", altered),
            nothing("sent twice after the clean stop", self.twice_after_stop),
        ]
    }
}

/// `1234` → `1,234`.
pub fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|group| str::from_utf8(group).ok()).collect();
    groups.join(",")
}

/// In ms, as precise as it matters.
pub fn millis(wait: Duration) -> String {
    let millis = wait.as_secs_f64() * 1e3;
    if millis < 99.95 {
        return format!("{millis:.1} ms");
    }
    format!("{} ms", thousands(usize::try_from(wait.as_millis()).unwrap_or(usize::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn short_waits_show_a_fraction() {
        assert_eq!(millis(Duration::from_micros(4_130)), "4.1 ms");
        assert_eq!(millis(Duration::from_millis(2_310)), "2,310 ms");
    }

    #[test]
    fn one_record_sent_again_after_a_clean_stop_breaks_the_promise() {
        let verdict = Verdict { written: 1, delivered: 1, ..Verdict::default() };
        let account = Account { verdict, ..Account::default() };
        assert!(account.rows().iter().all(|row| row.holds));
        assert!(!Account { twice_after_stop: 1, ..account }.rows().iter().all(|row| row.holds));
    }
}
