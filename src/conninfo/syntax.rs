//! The two forms of connection string, taken apart into parameters as libpq does it.
//!
//! Owns quoting and percent-encoding; knows no parameter's meaning. Errors never quote the text: any part of it may be
//! (a piece of) the password.
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING>

use std::{collections::BTreeMap, iter::Peekable, str::Chars};

use super::ConnInfoError;

/// Parameter → value; a later one replaces an earlier one, as in libpq.
pub(super) type Parameters = BTreeMap<String, String>;

const ENCODE: &str = "percent-encode special characters in the user name and password (@ is %40, / is %2F, % is %25)";

/// Takes either form apart.
pub(super) fn parameters(text: &str) -> Result<Parameters, ConnInfoError> {
    let text = text.trim();
    match text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://")) {
        Some(rest) => url(rest),
        // a value of the other form may hold anything, but stands behind a "="
        None if text.split_once("://").is_some_and(|(scheme, _)| !scheme.contains('=')) => {
            Err(ConnInfoError::Syntax("a URL starts with postgres:// or postgresql://"))
        }
        None => key_value(text),
    }
}

fn url(rest: &str) -> Result<Parameters, ConnInfoError> {
    let mut parameters = Parameters::new();
    // A user part ends at the first @, unless a / comes before it.
    let rest = match rest.find(['@', '/']) {
        Some(end) if rest[end..].starts_with('@') => {
            credentials(&rest[..end], &mut parameters)?;
            &rest[end + 1..]
        }
        _ => rest,
    };
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let (hosts, database) = rest.split_once('/').map_or((rest, None), |(hosts, database)| (hosts, Some(database)));
    if hosts.contains('@') || database.is_some_and(|database| database.contains('@')) {
        return Err(ConnInfoError::Syntax(ENCODE));
    }
    host_list(hosts, &mut parameters)?;
    if let Some(database) = database.filter(|database| !database.is_empty()) {
        parameters.insert("dbname".into(), decode(database)?);
    }
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or(ConnInfoError::Syntax("a parameter after ? has no ="))?;
        if pair.contains('@') && !plain(key) {
            return Err(ConnInfoError::Syntax(ENCODE));
        }
        parameters.insert(decode(key)?, decode(value)?);
    }
    Ok(parameters)
}

fn plain(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

fn credentials(text: &str, parameters: &mut Parameters) -> Result<(), ConnInfoError> {
    let (user, password) = text.split_once(':').map_or((text, None), |(user, password)| (user, Some(password)));
    if !user.is_empty() {
        parameters.insert("user".into(), decode(user)?);
    }
    if let Some(password) = password.filter(|password| !password.is_empty()) {
        parameters.insert("password".into(), decode(password)?);
    }
    Ok(())
}

/// `host:port,host:port`, each part optional, IPv6 addresses in brackets.
fn host_list(text: &str, parameters: &mut Parameters) -> Result<(), ConnInfoError> {
    if text.is_empty() {
        return Ok(());
    }
    let mut hosts = Vec::new();
    let mut ports = Vec::new();
    for part in text.split(',') {
        let (host, port) = if let Some(rest) = part.strip_prefix('[') {
            let (host, rest) = rest.split_once(']').ok_or(ConnInfoError::Syntax("an IPv6 address lacks its ]"))?;
            match rest.strip_prefix(':') {
                Some(port) => (host, port),
                None if rest.is_empty() => (host, ""),
                None => return Err(ConnInfoError::Syntax("after the ] of an IPv6 address comes :port or nothing")),
            }
        } else {
            part.split_once(':').unwrap_or((part, ""))
        };
        if !port.is_empty() && port.parse::<u16>().is_err() {
            return Err(ConnInfoError::Syntax(
                "what follows host: is no port number; percent-encode special characters in the password (/ is %2F)",
            ));
        }
        hosts.push(decode(host)?);
        ports.push(port);
    }
    if hosts.iter().any(|host| !host.is_empty()) {
        parameters.insert("host".into(), hosts.join(","));
    }
    if ports.iter().any(|port| !port.is_empty()) {
        parameters.insert("port".into(), ports.join(","));
    }
    Ok(())
}

fn decode(text: &str) -> Result<String, ConnInfoError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        match (digit(rest.next()), digit(rest.next())) {
            (Some(0), Some(0)) => return Err(ConnInfoError::Syntax("%00 is not allowed")),
            (Some(high), Some(low)) => bytes.push(u8::try_from(high * 16 + low).expect("two hex digits fit a byte")),
            _ => return Err(ConnInfoError::Syntax("a % that no two hex digits follow; a % itself is written %25")),
        }
    }
    String::from_utf8(bytes).map_err(|_| ConnInfoError::Syntax("percent-encoded text is not UTF-8"))
}

fn key_value(text: &str) -> Result<Parameters, ConnInfoError> {
    let mut parameters = Parameters::new();
    let mut rest = text.chars().peekable();
    let mut after_bare_password = false;
    loop {
        skip_space(&mut rest);
        let mut key = String::new();
        while let Some(c) = rest.next_if(|&c| c != '=' && !c.is_whitespace()) {
            key.push(c);
        }
        if key.is_empty() && rest.peek().is_none() {
            return Ok(parameters);
        }
        skip_space(&mut rest);
        if key.is_empty() || rest.next() != Some('=') {
            return Err(ConnInfoError::Syntax(
                "expected key=value pairs or a postgres:// URL; a value with spaces goes in single quotes",
            ));
        }
        // What follows an unquoted password may be the rest of it: it must not appear as an unknown parameter.
        if after_bare_password && !plain(&key) {
            return Err(ConnInfoError::Syntax("a password with spaces goes in single quotes"));
        }
        skip_space(&mut rest);
        after_bare_password = key == "password" && rest.peek() != Some(&'\'');
        parameters.insert(key, value(&mut rest)?);
    }
}

fn skip_space(rest: &mut Peekable<Chars<'_>>) {
    while rest.next_if(|c| c.is_whitespace()).is_some() {}
}

/// A value, bare or in single quotes; a backslash takes the next character as it is.
fn value(rest: &mut Peekable<Chars<'_>>) -> Result<String, ConnInfoError> {
    let quoted = rest.next_if_eq(&'\'').is_some();
    let mut value = String::new();
    loop {
        match rest.peek() {
            None if quoted => return Err(ConnInfoError::Syntax("a single quote is not closed")),
            None => break,
            Some('\'') if quoted => {
                rest.next();
                break;
            }
            Some(c) if !quoted && c.is_whitespace() => break,
            Some(_) => match rest.next() {
                Some('\\') => value.extend(rest.next()),
                c => value.extend(c),
            },
        }
    }
    if value.contains('\0') {
        return Err(ConnInfoError::Syntax("a NUL character is not allowed"));
    }
    Ok(value)
}
