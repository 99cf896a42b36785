//! The Helm chart, rendered by helm and read by the types of the Kubernetes API. `make test-deploy` runs it: helm must be
//! compiled once, which takes minutes.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use walpost::config;
use yaml_rust2::{Yaml, YamlLoader};

const REQUIRED: [&str; 2] = ["postgres.url=postgres://walpost@db:5432/app", "kafka.brokers=kafka:9092"];

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn helm(arguments: &[&str]) -> Output {
    let tools = Command::new(project().join("tests/services/fetch.sh")).arg("helm").output().expect("fetch.sh runs");
    let answer = String::from_utf8_lossy(&tools.stdout);
    let folder = answer.trim().strip_prefix("helm ").unwrap_or_else(|| panic!("no helm: {tools:?}"));
    let chart = project().join("deploy/helm/walpost");
    let mut command = Command::new(PathBuf::from(folder).join("helm"));
    command.arg(arguments[0]).args(["x"].iter().filter(|_| arguments[0] == "template")).arg(chart);
    command.args(&arguments[1..]).args(["--kube-version", "1.31.0"]).output().expect("helm runs")
}

fn rendered(values: &[&str]) -> Vec<Yaml> {
    let values = REQUIRED.iter().chain(values).flat_map(|value| ["--set", value]);
    let output = helm(&["template"].into_iter().chain(values).collect::<Vec<_>>());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert_taken_by_the_api(&text);
    YamlLoader::load_from_str(&text).expect("YAML").into_iter().filter(|document| !document.is_null()).collect()
}

/// Field names and types, by the API's own types.
fn assert_taken_by_the_api(manifests: &str) {
    let mut reader = Command::new("go")
        .args(["run", "."])
        .current_dir(project().join("tests/deploy/manifests"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("go runs");
    reader.stdin.take().expect("a pipe").write_all(manifests.as_bytes()).expect("it reads");
    let output = reader.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn one<'a>(manifests: &'a [Yaml], kind: &str) -> Option<&'a Yaml> {
    manifests.iter().find(|manifest| manifest["kind"].as_str() == Some(kind))
}

#[test]
fn helm_finds_nothing_to_complain_about() {
    let values: Vec<_> = REQUIRED.iter().flat_map(|value| ["--set", value]).collect();
    let output = helm(&[&["lint", "--strict"], &values[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn what_is_missing_or_misspelt_is_said() {
    let output = helm(&["template"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("postgres.url is required"), "{output:?}");
    let output = helm(&["template", "--set", "replica=3"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("replica"), "{output:?}");
}

#[test]
fn the_pods_are_harmless_and_walpost_takes_their_settings() {
    let manifests = rendered(&[
        "postgres.passwordSecret.name=pg",
        "kafka.propertiesSecret=kafka",
        "kafka.passwordSecret.name=kafka-password",
    ]);
    let deployment = one(&manifests, "Deployment").expect("a Deployment");
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let security = &container["securityContext"];
    assert_eq!(pod["securityContext"]["runAsNonRoot"].as_bool(), Some(true));
    assert_eq!(security["readOnlyRootFilesystem"].as_bool(), Some(true));
    assert_eq!(security["capabilities"]["drop"][0].as_str(), Some("ALL"));
    assert_eq!(container["readinessProbe"]["httpGet"]["path"].as_str(), Some("/readyz?standby=ok"));

    let toml = one(&manifests, "ConfigMap").expect("a ConfigMap")["data"]["walpost.toml"].as_str().expect("text");
    let mut variables = Vec::new();
    for variable in container["env"].as_vec().expect("an environment") {
        let name = variable["name"].as_str().expect("a name");
        let value = match variable["value"].as_str() {
            // that of a Secret
            None if name.contains("_SASL_") => "some",
            None => continue,
            Some(_) if name.ends_with("_PASSWORD_FILE") => "/dev/null",
            Some(value) => value,
        };
        variables.push((name.into(), value.into()));
    }
    if let Err(faults) = config::load_from(Some(("walpost.toml", toml)), variables, &[]) {
        panic!("{faults}");
    }
    let mounts = container["volumeMounts"].as_vec().expect("mounts");
    assert!(mounts.iter().all(|mount| mount["subPath"].is_badvalue()), "a changed Secret would not appear");
}

#[test]
fn what_is_asked_for_is_made_and_nothing_else() {
    let kinds = |values: &[&str]| {
        let manifests = rendered(values);
        let mut kinds: Vec<_> = manifests.iter().map(|one| one["kind"].as_str().expect("a kind").to_owned()).collect();
        kinds.sort();
        kinds.join(" ")
    };
    let usual = "ConfigMap Deployment NetworkPolicy PodDisruptionBudget Service ServiceAccount";
    assert_eq!(kinds(&[]), usual);
    assert_eq!(kinds(&["serviceMonitor.enabled=true"]), format!("{usual} ServiceMonitor"));
    assert_eq!(kinds(&["replicas=1", "networkPolicy.enabled=false"]), "ConfigMap Deployment Service ServiceAccount");
    let secret = ["existingConfigSecret=s", "serviceAccount.name=mine", "networkPolicy.egress[0].ports[0].port=5432"];
    assert_eq!(kinds(&secret), "Deployment NetworkPolicy PodDisruptionBudget Service");
}
