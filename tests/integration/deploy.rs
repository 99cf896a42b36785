//! `docker-compose.yml` and `deploy/Dockerfile`. No engine is needed: what they say is read, and run as they say it.

use std::{path::Path, time::Duration};

use clap::Parser;
use walpost::{cli::Cli, config};
use yaml_rust2::{Yaml, YamlLoader};

use crate::services::{
    kafka::Kafka,
    postgres::{Postgres, Version},
    walpost::Walpost,
};

const PATIENCE: Duration = Duration::from_secs(30);
const COMPOSE: &str = include_str!("../../docker-compose.yml");
const DOCKERFILE: &str = include_str!("../../deploy/Dockerfile");

fn compose() -> Yaml {
    YamlLoader::load_from_str(COMPOSE).expect("docker-compose.yml is YAML").remove(0)
}

fn environment(service: &str) -> Vec<(String, String)> {
    let compose = compose();
    let variables = compose["services"][service]["environment"].as_hash().expect("an environment");
    let text = |yaml: &Yaml| yaml.as_str().expect("a string").to_owned();
    variables.iter().map(|(name, value)| (text(name), text(value))).collect()
}

fn command(service: &str) -> Vec<String> {
    let compose = compose();
    let words = compose["services"][service]["command"].as_vec().expect("a command in list form").clone();
    words.iter().map(|word| word.as_str().expect("a word").to_owned()).collect()
}

/// The value of an instruction's last occurrence.
fn instruction(name: &str) -> &'static str {
    let mut lines = DOCKERFILE.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    lines.next_back().unwrap_or_else(|| panic!("no {name} in the Dockerfile"))
}

#[test]
fn the_compose_file_configures_walpost_with_names_that_it_knows() {
    for service in ["init", "walpost"] {
        let variables = environment(service).into_iter().map(|(name, value)| (name.into(), value.into()));
        if let Err(faults) = config::load_from(None, variables, &[]) {
            panic!("service {service}: {faults}");
        }
        let words = [vec!["walpost".to_owned()], command(service)].concat();
        assert!(Cli::try_parse_from(&words).is_ok(), "service {service}: {words:?}");
    }
}

#[test]
fn every_service_has_an_image_that_exists_or_is_built_here_and_waits_for_healthy_ones() {
    let compose = compose();
    let services = compose["services"].as_hash().expect("services");
    for (name, service) in services {
        let image = service["image"].as_str();
        let known = image.is_some_and(|image| {
            ["postgres:18", "apache/kafka:4.1.0", "prom/prometheus:v3.1.0", "grafana/grafana:11.4.0"].contains(&image)
        });
        let built = service["build"]["dockerfile"].as_str() == Some("deploy/Dockerfile");
        assert!(known || built, "{name:?}: image {image:?}");
        let Some(needs) = service["depends_on"].as_hash() else { continue };
        for (needed, how) in needs {
            let needed =
                services.get(needed).unwrap_or_else(|| panic!("{name:?} needs {needed:?}, which is not there"));
            if how["condition"].as_str() == Some("service_healthy") {
                assert!(
                    needed["healthcheck"]["test"].as_vec().is_some(),
                    "{name:?} waits for health that nobody checks"
                );
            }
        }
    }
}

#[test]
fn the_image_listens_where_its_health_check_and_the_compose_file_look() {
    let listen = instruction("ENV").strip_prefix("WALPOST_HTTP_LISTEN=0.0.0.0:").expect("the listener's address");
    assert_eq!(instruction("EXPOSE"), listen);
    let asks = instruction("HEALTHCHECK").split("CMD ").nth(1).expect("a command");
    let asks: Vec<String> = serde_json::from_str(asks).expect("a command in list form: there is no shell");
    assert!(Cli::try_parse_from(&asks).is_ok() && asks.contains(&"--probe".to_owned()), "{asks:?}");
    let user: u32 = instruction("USER").split(':').next().expect("a user").parse().expect("a number");
    assert_ne!(user, 0);
    let published = compose()["services"]["walpost"]["ports"][0].as_str().map(str::to_owned);
    assert_eq!(published, Some(format!("127.0.0.1:{listen}:{listen}")));
    assert_eq!(instruction("ENTRYPOINT"), r#"["/usr/local/bin/walpost"]"#);
    assert!(Cli::try_parse_from(["walpost", instruction("CMD").trim_matches(['[', ']', '"'])]).is_ok());
    let copied =
        DOCKERFILE.lines().filter_map(|line| line.strip_prefix("COPY ")).filter(|line| !line.starts_with("--"));
    for source in copied.flat_map(|line| line.split(' ').rev().skip(1)) {
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(source).exists(), "COPY {source}: there is no such thing");
    }
}

#[test]
fn every_file_that_the_compose_file_mounts_is_there() {
    let compose = compose();
    let services = compose["services"].as_hash().expect("services").values();
    let mounts: Vec<_> = services.filter_map(|service| service["volumes"].as_vec()).flatten().collect();
    assert!(mounts.len() >= 4, "{mounts:?}");
    for mount in mounts {
        let source = mount.as_str().and_then(|mount| mount.split(':').next()).expect("source:target");
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(source).exists(), "{source} is not there");
    }
}

#[test]
fn prometheus_scrapes_walpost_where_it_listens_and_grafana_asks_prometheus() {
    let yaml = |text| YamlLoader::load_from_str(text).expect("YAML").remove(0);
    let prometheus = yaml(include_str!("../../deploy/prometheus/prometheus.yml"));
    let listen = instruction("EXPOSE");
    let target = prometheus["scrape_configs"][0]["static_configs"][0]["targets"][0].as_str();
    assert_eq!(target, Some(format!("walpost:{listen}").as_str()));
    let mounted = |service: &str, target: &str| {
        let compose = compose();
        let volumes = compose["services"][service]["volumes"].as_vec().expect("volumes").clone();
        assert!(volumes.iter().any(|volume| volume.as_str().unwrap().contains(target)), "{target}");
    };
    mounted("prometheus", prometheus["rule_files"][0].as_str().expect("rules"));
    let source = yaml(include_str!("../../deploy/grafana/provisioning/datasources/prometheus.yml"));
    assert_eq!(source["datasources"][0]["url"].as_str(), Some("http://prometheus:9090"));
    let provider = yaml(include_str!("../../deploy/grafana/provisioning/dashboards/walpost.yml"));
    mounted("grafana", provider["providers"][0]["options"]["path"].as_str().expect("a folder"));
}

/// `make test-deploy` renders the chart; this sees what can be seen without helm.
#[test]
fn the_chart_knows_the_values_that_its_templates_use() {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/helm/walpost");
    let read = |name: &str| std::fs::read_to_string(chart.join(name)).expect("a file of the chart");
    let load = |name| YamlLoader::load_from_str(&read(name)).expect("YAML").remove(0);
    let (about, values) = (load("Chart.yaml"), load("values.yaml"));
    for key in ["version", "appVersion"] {
        assert_eq!(about[key].as_str(), Some(env!("CARGO_PKG_VERSION")), "{key}");
    }
    let mut used = 0;
    for template in std::fs::read_dir(chart.join("templates")).expect("templates") {
        let text = std::fs::read_to_string(template.expect("a file").path()).expect("text");
        for path in text.split(".Values.").skip(1) {
            let end = path.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '.').unwrap_or(path.len());
            let value = path[..end].split('.').fold(&values, |value, key| &value[key]);
            assert!(!value.is_badvalue(), "values.yaml has no {}", &path[..end]);
            used += 1;
        }
    }
    assert!(used > 30, "{used}");
    let schema: serde_json::Value = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    for key in values.as_hash().expect("values").keys() {
        assert!(schema["properties"].get(key.as_str().unwrap()).is_some(), "values.schema.json has no {key:?}");
    }
}

#[test]
fn what_compose_runs_takes_an_order_to_kafka() {
    let (database, kafka) = (Postgres::shared(Version::NEWEST).database(), Kafka::shared());
    let (url, brokers) = (database.url(), kafka.brokers());
    let mut variables = environment("walpost");
    for (name, value) in &mut variables {
        match name.as_str() {
            "WALPOST_POSTGRES_URL" => value.clone_from(&url),
            "WALPOST_KAFKA_BROKERS" => value.clone_from(&brokers),
            _ => {}
        }
    }
    let variables: Vec<_> = variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let init: Vec<_> = command("init");
    let init: Vec<_> = init.iter().map(String::as_str).collect();
    let ended = Walpost::run_to_end(&init, &variables);
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    let walpost = Walpost::start(&variables);
    walpost.wait_until_ready(PATIENCE);

    let shop = command("orders").pop().expect("a script");
    let table = shop.split("psql -qc '").nth(1).and_then(|rest| rest.split('\'').next()).expect("the table");
    let order = shop.split("<<'SQL'").nth(1).and_then(|rest| rest.split("\nSQL").next()).expect("the order");
    database.execute(table);
    database.execute(order);
    let topic = "outbox.order.placed";
    let records = kafka.read_until(&[topic], PATIENCE, |records| !records.is_empty());
    assert_eq!(records[0].key.as_deref(), Some(&b"1"[..]));
    assert!(String::from_utf8_lossy(records[0].value.as_deref().unwrap()).contains("\"order\""));
    assert_eq!(walpost.sigterm_and_wait(PATIENCE), Some(0), "{}", walpost.log());
}
