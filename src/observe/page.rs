//! The status page at `/`: one page that brings all it needs, and asks only for `/status/history`.
//!
//! It is the same for everybody: what a database or a broker said comes as JSON and is set as text, never as markup. The
//! policy allows exactly the style and the script of the page itself, by their hashes.

use std::sync::LazyLock;

use axum::{
    http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS},
    response::IntoResponse,
};

const FRAME: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

static PAGE: LazyLock<String> = LazyLock::new(|| FRAME.replace("/* style */", STYLE).replace("/* script */", SCRIPT));

static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |text: &str| openssl::base64::encode_block(&openssl::sha::sha256(text.as_bytes()));
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    )
});

/// The answer to `GET /`.
pub async fn answer() -> impl IntoResponse {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, &**POLICY),
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (headers, PAGE.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_needs_nothing_from_elsewhere() {
        assert!(PAGE.contains(STYLE) && PAGE.contains(SCRIPT));
        for outside in ["http://", "https://", "src=", "@import", "url(", " style=", "onclick", "innerHTML"] {
            let found = PAGE.replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(outside), "{outside}");
        }
    }
}
