//! A headless Chromium, spoken to by its `DevTools` protocol over two pipes:
//! <https://chromedevtools.github.io/devtools-protocol/>.

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::Command,
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{process::Process, run, wait_for};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A browser with one page; ends when this is dropped.
pub struct Browser {
    process: Process,
    commands: File,
    answers: Receiver<Value>,
    session: Value,
    last: u64,
    /// What the page complained of: errors, and what its policy forbade.
    complaints: Vec<String>,
}

impl Browser {
    /// Starts it and opens a page of this size.
    pub fn open(url: &str, (width, height): (u32, u32)) -> Self {
        let folder = run::folder("chromium");
        let [down, up] = ["commands", "answers"].map(|name| folder.join(name));
        let made = Command::new("mkfifo").args([&down, &up]).status().expect("mkfifo starts");
        assert!(made.success(), "two pipes in our own folder");
        let browser = format!(
            "exec chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
             --disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe \
             --user-data-dir={} 3<{} 4>{}",
            folder.join("profile").display(),
            down.display(),
            up.display()
        );
        let process =
            Process::start("chromium", &folder, Command::new("sh").arg("-c").arg(browser).env("HOME", &folder));
        let commands = File::options().write(true).open(&down).expect("the browser reads commands");
        let answers = listen(&up);
        let mut browser = Self { process, commands, answers, session: Value::Null, last: 0, complaints: Vec::new() };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", &json!({ "targetId": target, "flatten": true }));
        browser.session = attached["sessionId"].clone();
        for domain in ["Runtime", "Log", "Page", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", &size);
        browser.call("Page.navigate", &json!({ "url": url }));
        browser
    }

    /// Shows the page in `light` or `dark`.
    pub fn prefer(&mut self, scheme: &str) {
        let feature = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "features": feature }));
    }

    /// The value of an expression of JavaScript.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let answer = self.call("Runtime.evaluate", &json!({ "expression": expression, "returnByValue": true }));
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true; before, it may fail.
    pub fn wait_until(&mut self, expression: &str) {
        let tried = format!("(() => {{ try {{ return {expression} }} catch {{ return false }} }})()");
        wait_for(PATIENCE, expression, || (self.evaluate(&tried) == true).then_some(()));
    }

    /// The text of an element.
    pub fn text(&mut self, selector: &str) -> String {
        let text = self.evaluate(&format!("document.querySelector({}).textContent", &json!(selector)));
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Presses a key.
    pub fn press(&mut self, key: &str, code: u32) {
        for kind in ["keyDown", "keyUp"] {
            let event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            self.call("Input.dispatchKeyEvent", &event);
        }
    }

    /// What a screen reader is told: (role, name) of each node.
    pub fn read_out(&mut self) -> Vec<(String, String)> {
        let tree = self.call("Accessibility.getFullAXTree", &json!({}));
        let nodes = tree["nodes"].as_array().cloned().unwrap_or_default();
        let text = |node: &Value, part: &str| node[part]["value"].as_str().unwrap_or_default().to_owned();
        nodes
            .iter()
            .filter(|node| node["ignored"] != true)
            .map(|node| (text(node, "role"), text(node, "name")))
            .collect()
    }

    /// A picture of the whole page, as PNG.
    pub fn screenshot(&mut self) -> Vec<u8> {
        let shot = self.call("Page.captureScreenshot", &json!({ "captureBeyondViewport": true }));
        openssl::base64::decode_block(shot["data"].as_str().expect("a picture")).expect("base64")
    }

    /// Errors of the page's script, and what its policy has forbidden.
    pub fn complaints(&self) -> &[String] {
        &self.complaints
    }

    fn call(&mut self, method: &str, params: &Value) -> Value {
        self.last += 1;
        let mut command = json!({ "id": self.last, "method": method, "params": params });
        if !self.session.is_null() {
            command["sessionId"] = self.session.clone();
        }
        write!(self.commands, "{command}\0").expect("the browser reads");
        let start = Instant::now();
        loop {
            let answer = self.answers.recv_timeout(PATIENCE.saturating_sub(start.elapsed()));
            let answer = answer.unwrap_or_else(|error| panic!("{method}: {error}\n{}", self.process.log()));
            if answer["id"] == self.last {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            let complains = answer["method"] == "Runtime.exceptionThrown"
                || answer["method"] == "Log.entryAdded" && answer["params"]["entry"]["level"] == "error";
            if complains {
                self.complaints.push(answer["params"].to_string());
            }
        }
    }
}

fn listen(pipe: &Path) -> Receiver<Value> {
    let file = File::open(pipe).expect("the browser answers");
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for message in BufReader::new(file).split(0).map_while(Result::ok) {
            let Ok(message) = serde_json::from_slice(&message) else { continue };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    receiver
}
