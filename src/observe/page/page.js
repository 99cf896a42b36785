"use strict";
// Everything that comes from outside goes through textContent, so nothing of it is ever markup.
const HALF_HOUR = 30 * 60 * 1000;
const WIDTH = 600, HEIGHT = 150, TOP = 8;
const byId = (id) => document.getElementById(id);
const set = (id, text) => { if (byId(id).textContent !== text) byId(id).textContent = text; };

const count = (n) => n.toLocaleString("en");
const bytes = (n) => {
  if (n === null || n === undefined) return "unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (n >= 1024 && power < 5) { n /= 1024; power += 1; }
  return (power === 0 ? n : n.toFixed(1)) + " " + units[power];
};
const seconds = (n) => {
  if (n === null || n === undefined) return "unknown";
  if (n < 1) return n === 0 ? "0 s" : Math.ceil(n * 1000) + " ms";
  if (n < 120) return n.toFixed(1) + " s";
  if (n < 7200) return Math.round(n / 60) + " min";
  return (n / 3600).toFixed(1) + " h";
};
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function fill(id, rows) {
  byId(id).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells);
    return row;
  }));
  byId(id).hidden = rows.length === 0;
  const none = byId(id + "-none");
  if (none) none.hidden = rows.length > 0;
}

// One plot: a curve over half an hour, and a cursor that says what it was at a moment.
class Plot {
  constructor(name, format, least) {
    Object.assign(this, { name, format, least, cursor: null, points: [] });
    this.svg = byId(name + "-plot");
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.moveTo(this.from + ((event.clientX - box.left) / box.width) * HALF_HOUR);
    });
    for (const left of ["pointerleave", "blur"]) {
      this.svg.addEventListener(left, () => { this.cursor = null; this.draw(); });
    }
  }

  show(samples, values, now) {
    this.from = now - HALF_HOUR;
    this.points = samples.at_ms
      .map((at, index) => ({ at, value: values[index], ready: samples.ready[index] }))
      .filter((point) => point.at >= this.from);
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12, Home: -1e6, End: 1e6 }[event.key];
    if (step === undefined || this.points.length === 0) return;
    event.preventDefault();
    const last = this.points.length - 1;
    const present = this.cursor === null ? last + 1 : this.index();
    this.cursor = this.points[Math.min(last, Math.max(0, present + step))].at;
    this.draw();
  }

  moveTo(at) {
    if (this.points.length === 0) return;
    this.cursor = at;
    this.cursor = this.points[this.index()].at;
    this.draw();
  }

  index() {
    let best = 0;
    this.points.forEach((point, index) => {
      if (Math.abs(point.at - this.cursor) < Math.abs(this.points[best].at - this.cursor)) best = index;
    });
    return best;
  }

  draw() {
    const known = this.points.filter((point) => point.value !== null);
    const most = known.reduce((most, point) => Math.max(most, point.value), 0);
    const scale = Math.max(most, this.least);
    const x = (at) => (((at - this.from) / HALF_HOUR) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - (value / scale) * (HEIGHT - TOP)).toFixed(1);
    const shapes = [TOP, (HEIGHT + TOP) / 2].map((at) => shape("line", { x1: 0, x2: WIDTH, y1: at, y2: at, class: "grid" }));
    for (const part of this.unbroken()) {
      const line = part.map((point) => x(point.at) + "," + y(point.value)).join(" ");
      const [first, last] = [part[0], part[part.length - 1]];
      shapes.push(shape("polygon", { points: `${x(first.at)},${HEIGHT} ${line} ${x(last.at)},${HEIGHT}`, class: "area" }));
      shapes.push(shape("polyline", { points: line, class: "curve" }));
    }
    const step = (period / HALF_HOUR) * WIDTH;
    for (const point of this.points.filter((point) => !point.ready)) {
      shapes.push(shape("rect", { x: x(point.at - period), y: HEIGHT, width: step.toFixed(1), height: 5, class: "down" }));
    }
    if (this.cursor !== null) {
      const at = x(this.cursor);
      shapes.push(shape("line", { x1: at, x2: at, y1: 0, y2: HEIGHT, class: "cursor" }));
    }
    this.svg.replaceChildren(...shapes);
    set(this.name + "-top", "top line: " + this.format(scale));
    set(this.name + "-text", this.text(known, most));
  }

  // The curve breaks where nothing is known, so that a gap does not look like a value.
  unbroken() {
    const parts = [];
    let before = null;
    for (const point of this.points) {
      if (point.value === null) { before = null; continue; }
      if (before === null || point.at - before > 4 * period) parts.push([]);
      parts[parts.length - 1].push(point);
      before = point.at;
    }
    return parts;
  }

  text(known, most) {
    if (this.cursor !== null) {
      const point = this.points[this.index()];
      return `${clock(point.at)}: ${point.value === null ? "unknown" : this.format(point.value)}${point.ready ? "" : ", not ready"}`;
    }
    return known.length === 0 ? "nothing known yet" : `at most ${this.format(most)}, now ${this.format(known[known.length - 1].value)}`;
  }
}

let period = 5000;
const plots = { seconds: new Plot("seconds", seconds, 1), bytes: new Plot("bytes", bytes, 1024) };

function verdict(status) {
  const box = byId("verdict");
  const polls = status.source === "poll";
  const doing = polls ? "Polling" : "Streaming";
  const [kind, text] = status.paused ? ["hold", "Paused: nothing is sent"]
    : status.ready ? ["good", doing]
    : status.streaming ? ["bad", `${doing}, but not ready`]
    : ["bad", `Not ${doing.toLowerCase()}`];
  box.className = kind;
  set("headline", text);
  document.title = (kind === "good" ? "✓ " : kind === "hold" ? "⏸ " : "✗ ") + "walpost: " + text;
  const items = status.troubles.map((trouble) => `${trouble.part}: ${trouble.reason}`);
  if (byId("troubles").textContent !== items.join("")) {
    byId("troubles").replaceChildren(...items.map((item) => element("li", item)));
  }
}

function rate({ at_ms, events }) {
  const last = at_ms.length - 1;
  const first = Math.max(0, last - Math.round(60000 / period));
  if (last <= first) return "–";
  const each = (events[last] - events[first]) / ((at_ms[last] - at_ms[first]) / 1000);
  return each >= 10 || each === 0 ? count(Math.round(each)) : each.toFixed(1);
}

function tiles(seen) {
  const { status } = seen;
  set("lag-seconds", seconds(status.lag_seconds));
  set("lag-bytes", status.lag_bytes === null ? "" : bytes(status.lag_bytes) + " of WAL");
  set("rate", rate(seen.samples));
  const [events, size] = seen.in_flight_limits;
  set("in-flight", count(status.in_flight_events));
  set("in-flight-note", `of ${count(events)} events; ${bytes(status.in_flight_bytes)} of ${bytes(size)}`);
  const { retained_wal_bytes: retained, safe_wal_bytes: safe, slot_wal_status: state } = status;
  set("retained", retained === null ? "–" : bytes(retained));
  byId("retained").className = state === "lost" || state === "unreserved" ? "alarm" : "";
  const limited = retained !== null && safe !== null;
  const left = safe > 0 ? `${bytes(safe)} more until the slot is lost` : "over the limit: the slot may be lost at any checkpoint";
  set("retained-note", retained === null ? "unknown" : `${state}; ${limited ? left : "no limit is set"}`);
  byId("retained-meter").hidden = !limited;
  if (limited) byId("retained-meter").value = safe > 0 ? retained / (retained + safe) : 1;
  const dead = seen.dead_letters.reduce((sum, letter) => sum + letter.events, 0);
  set("dead", count(dead));
  byId("dead").className = dead > 0 ? "alarm" : "";
}

function tables(seen) {
  const number = (text) => element("td", text, { class: "number" });
  fill("errors", seen.errors.map((error) => [
    element("td", clock(error.at_ms)), element("td", error.part),
    element("td", error.times > 1 ? `${error.reason} (${count(error.times)} times)` : error.reason),
  ]));
  fill("topics", seen.topics.map((topic) => [element("td", topic.topic), number(count(topic.events)), number(bytes(topic.bytes))]));
  set("topics-more", seen.more_topics > 0 ? `and ${count(seen.more_topics)} more` : "");
  fill("letters", seen.dead_letters.map((letter) => [
    element("td", letter.topic || "no legal topic"), element("td", letter.reason), number(count(letter.events)),
  ]));
  const { status } = seen;
  const positions = [["Received", status.received_lsn], ["Confirmed", status.confirmed_lsn], ["Server", status.current_wal_lsn]];
  fill("positions", positions.map(([name, lsn]) => [element("th", name, { scope: "row" }), number(lsn || "unknown")]));
}

function show(seen) {
  const { status } = seen;
  period = seen.period_seconds * 1000;
  set("version", status.version);
  set("names", status.source === "poll" ? "polls the outbox tables" : `slot ${status.slot}, publication ${status.publication}`);
  verdict(status);
  tiles(seen);
  tables(seen);
  plots.seconds.show(seen.samples, seen.samples.lag_seconds, seen.now_ms);
  plots.bytes.show(seen.samples, seen.samples.lag_bytes, seen.now_ms);
}

let heard = null;
function silent() {
  byId("verdict").className = "bad";
  set("headline", "walpost does not answer");
  document.title = "✗ walpost does not answer";
  const since = heard === null ? "" : `; what stands below is as of ${heard.toLocaleTimeString("en-GB")}`;
  byId("troubles").replaceChildren(element("li", `Its process is gone, or the way to it is${since}.`));
  set("age", "");
}

async function ask() {
  try {
    const answer = await fetch("/status/history", { cache: "no-store", signal: AbortSignal.timeout(4000) });
    const seen = await answer.json();
    heard = new Date();
    show(seen);
    set("age", "as of " + heard.toLocaleTimeString("en-GB"));
  } catch (error) {
    console.error(error);
    silent();
  }
  setTimeout(ask, heard === null ? 1000 : period);
}
ask();
