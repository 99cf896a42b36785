//! What a connection string means, checked through [`ConnInfo::parse`].

use proptest::prelude::*;
use tokio_postgres::config::TargetSessionAttrs;

use super::*;

fn parse(text: &str) -> Result<ConnInfo, ConnInfoError> {
    ConnInfo::parse(text, None, None)
}

fn password(text: &str) -> Option<String> {
    parse(text).unwrap().password().unwrap().map(|password| password.expose().to_owned())
}

/// The error and its cause, as an operator sees them.
fn refusal(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn both_forms_say_the_same() {
    let url = parse("postgres://relay:pw@db1:5433,db2/shop?target_session_attrs=read-write&connect_timeout=3").unwrap();
    let pairs = "host=db1,db2 port=5433, user=relay password=pw dbname=shop target_session_attrs=read-write \
                 connect_timeout = 3";
    let pairs = parse(pairs).unwrap();
    assert_eq!(url.config, pairs.config);
    assert_eq!(url.redacted(), "relay@db1:5433,db2:5432/shop");
    assert_eq!(url.config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    assert_eq!(url.config.get_connect_timeout(), Some(&Duration::from_secs(3)));
}

#[test]
fn defaults_are_libpqs_with_a_bounded_connect() {
    let info = parse("postgresql://relay@db").unwrap();
    assert_eq!(info.tls.mode, SslMode::Prefer);
    assert_eq!(info.config.get_dbname(), Some("relay"));
    assert_eq!(info.config.get_application_name(), Some("walpost"));
    assert_eq!(info.config.get_connect_timeout(), Some(&DEFAULT_CONNECT_TIMEOUT));
    assert!(info.password().unwrap().is_none());
    assert!(parse("host=db").unwrap().config.get_user().is_some());
    assert_eq!(parse("host=db connect_timeout=0").unwrap().config.get_connect_timeout(), None);
    assert_eq!(parse("host=db application_name=x").unwrap().config.get_application_name(), Some("x"));
}

/// Case 42.
#[test]
fn odd_passwords_work_in_both_forms() {
    let odd = "p@s's/#%7!";
    assert_eq!(password("postgres://u:p%40s's%2F#%257!@h/d").as_deref(), Some(odd));
    assert_eq!(password("postgres://u:p%40s%27s%2F%23%257%21@h/d").as_deref(), Some(odd));
    assert_eq!(password(r"host=h user=u password='p@s\'s/#%7!' dbname=d").as_deref(), Some(odd));
    assert_eq!(password(r"host=h user=u password=p@s\'s/#%7! dbname=d").as_deref(), Some(odd));
    assert_eq!(password("host=h password='a b\\\\c'").as_deref(), Some("a b\\c"));
}

#[test]
fn an_odd_password_that_is_not_encoded_is_refused_and_not_shown() {
    for text in [
        "postgres://u:s3cr@t@h/d",
        "postgres://u:s3cr/t@h/d",
        "postgres://u:12/s3cr@h/d",
        "postgres://u:s3cr%t@h/d",
        "postgres://u:s3cr%00@h/d",
        "host=h password=s3cr t3cr=x",
        "host=h password='s3cr",
        "host=h s3cr",
        "mysql://u:s3cr@h/d",
        "postgres://u:s3cr@h/d?sslmode=s3cr",
        "postgres://u:s3cr@h:99999/d",
    ] {
        let refusal = refusal(text);
        assert!(!refusal.contains("3cr"), "{text}: {refusal}");
    }
}

#[test]
fn debug_shows_no_password() {
    let text = "postgres://u:s3cr@h/d?sslmode=disable&sslpassword=s3cr";
    let info = ConnInfo::parse(text, None, Some(Secret::new("s3cr"))).unwrap();
    assert!(!format!("{info:?} {}", info.redacted()).contains("s3cr"));
}

#[test]
fn the_url_wins_over_the_file_and_that_over_pgpassword() {
    let path = std::env::temp_dir().join(format!("walpost-password-{}", std::process::id()));
    std::fs::write(&path, "from file \r\n").unwrap();
    let pgpassword = || Some(Secret::new("from environment"));
    let shown = |info: &ConnInfo| info.password().unwrap().unwrap().expose().to_owned();

    let info = ConnInfo::parse("postgres://u:url@h", Some(path.clone()), pgpassword()).unwrap();
    assert_eq!(shown(&info), "url");
    let info = ConnInfo::parse("postgres://u@h", Some(path.clone()), pgpassword()).unwrap();
    assert_eq!(shown(&info), "from file ");
    std::fs::write(&path, "rotated").unwrap();
    assert_eq!(shown(&info), "rotated");
    std::fs::remove_file(&path).unwrap();
    assert!(info.password().is_err());
    let info = ConnInfo::parse("postgres://u@h", None, pgpassword()).unwrap();
    assert_eq!(shown(&info), "from environment");
}

#[test]
fn sslmode_is_libpqs() {
    let mode = |text: &str| parse(&format!("host=h {text}")).unwrap().tls.mode;
    assert_eq!(mode("sslmode=disable"), SslMode::Disable);
    assert_eq!(mode("sslmode=prefer"), SslMode::Prefer);
    assert_eq!(mode("sslmode=require"), SslMode::Require);
    assert_eq!(mode("sslmode=require sslrootcert=/ca.pem"), SslMode::VerifyCa);
    assert_eq!(mode("sslmode=verify-ca sslrootcert=/ca.pem"), SslMode::VerifyCa);
    assert_eq!(mode("sslmode=verify-full"), SslMode::VerifyFull);
    assert_eq!(mode("sslrootcert=system"), SslMode::VerifyFull);
    assert!(parse("host=h sslmode=verify-full").unwrap().verify_hostname());
    assert!(!parse("host=h sslmode=require").unwrap().verify_hostname());
    assert_eq!(parse("host=h sslmode=require").unwrap().config.get_ssl_mode(), WireSslMode::Require);
    assert_eq!(parse("host=/tmp sslmode=verify-full").unwrap().config.get_ssl_mode(), WireSslMode::Disable);
}

#[test]
fn weak_or_idle_tls_settings_are_refused_with_advice() {
    for (text, advice) in [
        ("sslmode=allow", "write prefer"),
        ("sslmode=strict", "must be disable, prefer"),
        ("sslmode=verify-ca", "needs sslrootcert"),
        ("sslmode=require sslrootcert=system", "needs sslmode=verify-full"),
        ("sslrootcert=/ca.pem", "add sslmode=verify-full"),
        ("sslnegotiation=direct", "needs sslmode=require"),
        ("sslmode=require sslcert=/c.pem", "needs both sslcert and sslkey"),
        ("sslmode=require sslcrl=/c.pem", "revocation lists are not read"),
    ] {
        let refusal = refusal(&format!("host=h {text}"));
        assert!(refusal.contains(advice), "{text}: {refusal}");
    }
}

#[test]
fn a_certificate_that_cannot_be_read_is_named() {
    let info = parse("host=h sslmode=verify-full sslrootcert=/nonexistent/ca.pem").unwrap();
    assert_eq!(info.tls_connector().unwrap_err().to_string(), "read `sslrootcert` /nonexistent/ca.pem");
}

#[test]
fn unix_sockets_are_directories() {
    for text in
        ["postgres:///shop?host=/run/pg&user=u", "postgres://u@%2Frun%2Fpg/shop", "host=/run/pg user=u dbname=shop"]
    {
        let info = parse(text).unwrap();
        assert_eq!(info.config.get_hosts(), [Host::Unix("/run/pg".into())], "{text}");
        assert_eq!(info.redacted(), "u@/run/pg:5432/shop", "{text}");
    }
}

#[test]
fn addresses_of_both_families_are_read() {
    assert_eq!(parse("postgres://u@[::1]:6000,127.0.0.1/d").unwrap().redacted(), "u@[::1]:6000,127.0.0.1:5432/d");
    let info = parse("hostaddr=10.0.0.7 user=u dbname=d").unwrap();
    assert_eq!(info.config.get_hosts(), [Host::Tcp("10.0.0.7".into())]);
    for text in ["postgres://u@[::1/d", "postgres://u@[::1]x/d", "host=h hostaddr=ten", "host=a,b hostaddr=10.0.0.1"] {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn timeouts_have_libpqs_units() {
    let info = parse("host=h tcp_user_timeout=1500 keepalives_count=4 keepalives_idle=7").unwrap();
    assert_eq!(info.config.get_tcp_user_timeout(), Some(&Duration::from_millis(1500)));
    assert_eq!(info.config.get_keepalives_retries(), Some(4));
    assert_eq!(info.config.get_keepalives_idle(), Duration::from_secs(7));
}

#[test]
fn unknown_and_unusable_parameters_are_named() {
    assert_eq!(refusal("host=h sslmod=x"), "unknown connection parameter `sslmod`, did you mean `sslmode`?");
    assert_eq!(refusal("postgres://h/d?schema=x"), "unknown connection parameter `schema`");
    for (text, key) in [
        ("user=u dbname=d", "host"),
        ("host=h port=x", "port"),
        ("host=a,b,c port=1,2", "port"),
        ("host=a,,c", "host"),
        ("host=h connect_timeout=soon", "connect_timeout"),
        ("host=h keepalives_count=x", "keepalives_count"),
        ("host=h target_session_attrs=prefer-standby", "target_session_attrs"),
        ("host=h channel_binding=x", "channel_binding"),
        ("host=h replication=database", "replication"),
        ("host=h passfile=/x", "passfile"),
        ("host=h gssencmode=require", "gssencmode"),
        ("host=h client_encoding=latin1", "client_encoding"),
    ] {
        let refusal = refusal(text);
        assert!(refusal.starts_with(&format!("connection parameter `{key}`: ")), "{text}: {refusal}");
    }
}

#[test]
fn options_are_kept_with_their_quoting() {
    let info = parse(r"host=h options='-c search_path=\'a\\ b\' -c x=1'").unwrap();
    assert_eq!(info.config.get_options(), Some(r"-c search_path='a\ b' -c x=1"));
}

#[test]
fn a_value_that_looks_like_a_url_makes_no_url_of_it() {
    let info = parse("host=h password='mysql://x' user=u").unwrap();
    assert_eq!(info.password().unwrap().unwrap().expose(), "mysql://x");
    assert!(parse("mysql://u@h/a?b=c").is_err_and(|error| error.to_string().contains("postgres://")));
}

fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::new(), |encoded, byte| encoded + &format!("%{byte:02X}"))
}

fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\\', r"\\").replace('\'', r"\'"))
}

proptest! {
    #[test]
    fn any_name_and_password_survive_both_forms(
        user in "[^\\x00]{1,12}", secret in "[^\\x00]{1,12}", database in "[^\\x00]{1,12}",
    ) {
        let encode = percent_encode;
        let url = format!("postgres://{}:{}@h/{}", encode(&user), encode(&secret), encode(&database));
        let pairs = format!("host=h user={} password={} dbname = {}", quote(&user), quote(&secret), quote(&database));
        for text in [url, pairs] {
            let info = parse(&text).unwrap();
            prop_assert_eq!(info.config.get_user(), Some(user.as_str()));
            prop_assert_eq!(info.config.get_dbname(), Some(database.as_str()));
            let password = info.password().unwrap().unwrap();
            prop_assert_eq!(password.expose(), secret.as_str());
        }
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,60}", url in "[a-z:@/?&=%,\\[\\]0-9#']{0,40}", pairs in "[a-z=' \\\\,]{0,40}") {
        let _ = parse(&text);
        let _ = parse(&format!("postgres://{url}"));
        let _ = parse(&pairs);
        let _ = parse(&format!("host=h {pairs}"));
    }
}
