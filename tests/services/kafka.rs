//! Apache Kafka in KRaft mode: one broker, or several.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, OnceLock},
    time::Duration,
};

use super::{
    process::{Process, tail},
    proxy::Proxy,
    run, topics, wait_until,
};

/// How long a broker may take to start.
const PATIENCE: Duration = Duration::from_mins(2);

/// Any base64 UUID; each cluster is alone on its ports.
const CLUSTER_ID: &str = "4L6g3nShT-eMCtK--X86sw";

/// How a cluster differs from the default one.
#[derive(Debug, Clone)]
pub struct Settings {
    nodes: usize,
    proxied: bool,
    secured: bool,
    properties: Vec<(String, String)>,
    jvm: &'static [&'static str],
}

impl Default for Settings {
    fn default() -> Self {
        // Up in two seconds rather than in the best shape after a minute.
        let jvm = &["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];
        Self { nodes: 1, proxied: false, secured: false, properties: Vec::new(), jvm }
    }
}

impl Settings {
    /// How many brokers. Three: internal topics and new topics have three replicas.
    #[must_use]
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// Puts a proxy before each broker, for those who ask for [`Kafka::proxied_brokers`].
    #[must_use]
    pub fn proxied(mut self) -> Self {
        self.proxied = true;
        self
    }

    /// A further listener with SASL over TLS, advertised as `localhost`; what it asks of clients is set as
    /// `listener.name.secured.…`.
    #[must_use]
    pub fn secured(mut self) -> Self {
        self.secured = true;
        self
    }

    /// A line of `server.properties`, for every node.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.properties.push((name.to_owned(), value.to_owned()));
        self
    }

    /// For measurements: the JVM as Kafka itself starts it.
    #[must_use]
    pub fn for_measuring(mut self) -> Self {
        self.jvm = &["-Xms512m", "-Xmx1g"];
        self
    }
}

/// One broker, which is a controller as well.
pub struct Node {
    folder: PathBuf,
    port: u16,
    secured_port: u16,
    proxy: Option<Proxy>,
    jvm: &'static [&'static str],
    process: Mutex<Option<Process>>,
}

impl Node {
    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port of the listener that is secured, where the settings want one.
    pub fn secured_port(&self) -> u16 {
        self.secured_port
    }

    /// The proxy before it, where the settings want one.
    pub fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("started with Settings::proxied")
    }

    /// Stops it in its tracks: connections stay open and silent.
    pub fn freeze(&self) {
        self.with_process(Process::freeze);
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.with_process(Process::thaw);
    }

    /// Ends it as a crash does.
    pub fn kill(&self) {
        self.with_process(Process::kill);
    }

    /// Starts it again after a kill, on the same port with the same data; does not wait until it serves.
    pub fn start_again(&self) {
        let mut command = java();
        command.args(self.jvm).args(["kafka.Kafka", "server.properties"]);
        let process = Process::start("kafka", &self.folder, &mut command);
        *self.process.lock().expect("no panic while the lock is held") = Some(process);
    }

    /// From now on it can write no file beyond so many bytes: what a full disk looks like to it. A broker that is started anew can.
    pub fn limit_files(&self, bytes: u64) {
        self.with_process(|process| {
            let mut command = Command::new("prlimit");
            command.args([format!("--pid={}", process.pid()), format!("--fsize={bytes}")]);
            assert!(command.status().expect("util-linux is there").success());
        });
    }

    /// What it logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("kafka.log")).unwrap_or_default()
    }

    fn with_process(&self, act: impl FnOnce(&Process)) {
        act(self.process.lock().expect("no panic while the lock is held").as_ref().expect("the broker was started"));
    }

    fn has_ended(&self) -> bool {
        self.process.lock().is_ok_and(|process| process.as_ref().is_none_or(|it| it.exit_status().is_some()))
    }

    /// Writes what `kafka-storage format` would; its only file that is hard to write is taken from `bootstrap`.
    fn format(&self, id: usize, properties: &str) {
        let data = self.folder.join("data");
        fs::create_dir(&data).expect("a folder in our own");
        fs::write(self.folder.join("server.properties"), properties).expect("a file in our own folder");
        fs::copy(bootstrap(), data.join("bootstrap.checkpoint")).expect("a file in our own folder");
        let meta = format!("version=1\ncluster.id={CLUSTER_ID}\nnode.id={id}\ndirectory.id={id}{}\n", &CLUSTER_ID[1..]);
        fs::write(data.join("meta.properties"), meta).expect("a file in our own folder");
    }
}

/// A cluster; ended and removed when this is dropped.
pub struct Kafka {
    nodes: Vec<Node>,
}

impl Kafka {
    /// The broker that all tests of this run share; started by the first. Break nothing in it but your own topics.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Kafka> = OnceLock::new();
        SHARED.get_or_init(|| Self::start(&Settings::default()))
    }

    /// A cluster of the test's own.
    pub fn start(settings: &Settings) -> Self {
        let ports: Vec<(u16, u16)> = (0..settings.nodes).map(|_| (run::free_port(), run::free_port())).collect();
        let behind: Vec<u16> = ports.iter().map(|_| run::free_port()).collect();
        let node = |(&(port, _), behind): (&(u16, u16), &u16)| Node {
            folder: run::folder("kafka"),
            port,
            secured_port: run::free_port(),
            proxy: settings.proxied.then(|| Proxy::before(*behind)),
            jvm: settings.jvm,
            process: Mutex::new(None),
        };
        let cluster = Self { nodes: ports.iter().zip(&behind).map(node).collect() };
        for (index, node) in cluster.nodes.iter().enumerate() {
            let mut further = Vec::new();
            if let Some(proxy) = &node.proxy {
                further.push(Listener {
                    name: "PROXIED",
                    port: behind[index],
                    host: "127.0.0.1",
                    advertised: proxy.port(),
                });
            }
            if settings.secured {
                let port = node.secured_port;
                further.push(Listener { name: "SECURED", port, host: "localhost", advertised: port });
            }
            node.format(index + 1, &properties(&node.folder, index, &ports, &further, settings));
            node.start_again();
        }
        cluster.wait_until_up();
        cluster
    }

    /// Waits until every broker serves.
    pub fn wait_until_up(&self) {
        wait_until(PATIENCE, "all brokers serve", || {
            for node in &self.nodes {
                assert!(!node.has_ended(), "a broker ended:\n{}", tail(&node.log()));
            }
            topics::serving_brokers(self) == self.nodes.len()
        });
    }

    /// The bootstrap servers.
    pub fn brokers(&self) -> String {
        addresses(self.nodes.iter().map(Node::port))
    }

    /// The bootstrap servers for those who shall meet the brokers through their proxies only.
    pub fn proxied_brokers(&self) -> String {
        addresses(self.nodes.iter().map(|node| node.proxy().port()))
    }

    /// The brokers, one by one; the id of each is its index plus one.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Stops all brokers in their tracks.
    pub fn freeze(&self) {
        self.nodes.iter().for_each(Node::freeze);
    }

    /// Lets them go on.
    pub fn thaw(&self) {
        self.nodes.iter().for_each(Node::thaw);
    }

    /// Ends all brokers as a crash does.
    pub fn kill(&self) {
        self.nodes.iter().for_each(Node::kill);
    }

    /// How many brokers have ended by themselves.
    pub fn ended(&self) -> usize {
        self.nodes.iter().filter(|node| node.has_ended()).count()
    }

    /// Starts all brokers again on their ports and waits until they serve.
    pub fn start_again(&self) {
        self.nodes.iter().for_each(Node::start_again);
        self.wait_until_up();
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            if let Ok(process) = node.process.get_mut() {
                process.take();
            }
            let _ = fs::remove_dir_all(&node.folder);
        }
    }
}

/// Runs a tool that came with the broker.
pub fn tool(class: &str, arguments: &[&str]) {
    let folder = run::folder("tool");
    let mut command = java();
    command.args(["-XX:TieredStopAtLevel=1", class]).args(arguments);
    let tool = Process::start("tool", &folder, &mut command);
    assert!(tool.wait(PATIENCE).success(), "{class} failed:\n{}", tool.log());
}

fn addresses(ports: impl Iterator<Item = u16>) -> String {
    ports.map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",")
}

fn java() -> Command {
    let mut command = Command::new("java");
    command.env_remove("JAVA_TOOL_OPTIONS").env_remove("CLASSPATH");
    command.arg("-XX:-UsePerfData").arg("-cp").arg(jars().join("*"));
    command
}

/// The folder of Kafka's jars.
fn jars() -> &'static Path {
    static JARS: OnceLock<PathBuf> = OnceLock::new();
    JARS.get_or_init(|| run::fetched("kafka"))
}

/// The first metadata records of a cluster: made by Kafka's own tool once in a run, since that costs a second of CPU.
fn bootstrap() -> &'static Path {
    static BOOTSTRAP: OnceLock<PathBuf> = OnceLock::new();
    BOOTSTRAP.get_or_init(|| {
        let folder = run::folder("format");
        let template = properties(&folder, 0, &[(1, 2)], &[], &Settings::default());
        fs::write(folder.join("server.properties"), template).expect("a file in our own folder");
        let mut command = java();
        command.args(["-XX:TieredStopAtLevel=1", "kafka.tools.StorageTool", "format"]);
        command.args(["-t", CLUSTER_ID, "-c", "server.properties"]);
        let format = Process::start("format", &folder, &mut command);
        assert!(format.wait(PATIENCE).success(), "kafka format failed:\n{}", tail(&format.log()));
        folder.join("data/bootstrap.checkpoint")
    })
}

/// A listener beside the one that all have.
struct Listener {
    name: &'static str,
    port: u16,
    host: &'static str,
    advertised: u16,
}

/// The configuration of a node.
fn properties(folder: &Path, index: usize, ports: &[(u16, u16)], further: &[Listener], settings: &Settings) -> String {
    let (port, controller) = ports[index];
    let (mut listener, mut advertised) = (String::new(), String::new());
    for it in further {
        write!(listener, ",{}://127.0.0.1:{}", it.name, it.port).expect("a string takes it");
        write!(advertised, ",{}://{}:{}", it.name, it.host, it.advertised).expect("a string takes it");
    }
    let voters = ports.iter().enumerate().map(|(i, (_, port))| format!("{}@127.0.0.1:{port}", i + 1));
    let voters = voters.collect::<Vec<_>>().join(",");
    let (id, replicas, folder) = (index + 1, ports.len().min(3), folder.join("data").display().to_string());
    // what a transaction's state is worth when two brokers are killed one after the other
    let in_sync = replicas.div_ceil(2);
    let mut text = format!(
        "process.roles=broker,controller\n\
         node.id={id}\n\
         controller.quorum.voters={voters}\n\
         listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}{listener}\n\
         advertised.listeners=PLAINTEXT://127.0.0.1:{port}{advertised}\n\
         listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT,SECURED:SASL_SSL\n\
         controller.listener.names=CONTROLLER\n\
         inter.broker.listener.name=PLAINTEXT\n\
         num.partitions=3\n\
         default.replication.factor={replicas}\n\
         offsets.topic.replication.factor={replicas}\n\
         offsets.topic.num.partitions=1\n\
         transaction.state.log.replication.factor={replicas}\n\
         transaction.state.log.min.isr={in_sync}\n\
         transaction.state.log.num.partitions=1\n\
         share.coordinator.state.topic.replication.factor={replicas}\n\
         share.coordinator.state.topic.min.isr=1\n\
         group.initial.rebalance.delay.ms=0\n\
         group.min.session.timeout.ms=1000\n\
         auto.create.topics.enable=false\n\
         log.dirs={folder}\n"
    );
    for (name, value) in &settings.properties {
        writeln!(text, "{name}={value}").expect("a string takes it");
    }
    text
}
