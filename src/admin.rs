//! The local admin of a running walpost: `POST /admin/pause`, `/admin/resume` and `/admin/stop` on the HTTP listener.
//!
//! Off unless a token is configured. Whoever has the token can hold events back, and so fill the database's disk; he cannot
//! lose or read any. Nothing is done by GET, and a browser cannot send the header to a foreign origin unasked.

use std::{path::PathBuf, sync::Arc};

use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    routing::post,
};
use openssl::{memcmp, sha::sha256};
use tokio::sync::watch;

use crate::{
    config::Secret,
    observe::{Health, Part, Progress},
    pipeline::Wish,
};

/// The shortest token that is taken; a shorter one can be guessed.
pub const SHORTEST_TOKEN: usize = 16;
/// What `/readyz` says meanwhile.
const PAUSED: &str =
    "paused by an operator: nothing is sent, and the slot retains WAL meanwhile; `walpost resume` lets it go on";

/// What lets an operator in.
#[derive(Debug, Clone)]
pub enum AdminToken {
    /// The token itself.
    Text(Secret),
    /// A file that holds it; read for each request, so that it can be replaced.
    File(PathBuf),
}

impl AdminToken {
    /// The token. An error where its file cannot be read, or holds none.
    pub fn read(&self) -> std::io::Result<Secret> {
        let text = match self {
            Self::Text(secret) => return Ok(secret.clone()),
            Self::File(path) => std::fs::read_to_string(path)?,
        };
        let text = text.trim();
        if text.len() < SHORTEST_TOKEN {
            let what = format!("it holds less than {SHORTEST_TOKEN} characters");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
        }
        Ok(Secret::new(text))
    }
}

/// What an operator can move.
#[derive(Debug)]
pub struct Admin {
    /// What lets him in; `None`: nobody.
    pub token: Option<AdminToken>,
    /// Nothing is sent while it is true.
    pub pause: watch::Sender<bool>,
    /// Told to stop as by a signal.
    pub wish: watch::Sender<Wish>,
    /// Where a pause is told.
    pub health: Arc<Health>,
    /// Where a pause is told.
    pub progress: Arc<Progress>,
}

impl Admin {
    fn refuses(&self, headers: &HeaderMap) -> Option<(StatusCode, &'static str)> {
        let Some(token) = &self.token else {
            return Some((StatusCode::NOT_FOUND, "the admin is off; set http.admin_token_file to turn it on\n"));
        };
        let given = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let token = match token.read() {
            Ok(token) => token,
            Err(error) => {
                tracing::error!(%error, "http.admin_token_file cannot be read");
                return Some((StatusCode::INTERNAL_SERVER_ERROR, "http.admin_token_file cannot be read\n"));
            }
        };
        // of equal length, and compared in a time that says nothing of where they differ
        let same = given.is_some_and(|given| memcmp::eq(&sha256(given), &sha256(token.expose().as_bytes())));
        (!same).then_some((StatusCode::UNAUTHORIZED, "send the header `Authorization: Bearer <token>`\n"))
    }

    fn act(&self, action: &str) -> (StatusCode, &'static str) {
        match action {
            "pause" => {
                self.health.hold(Part::Pause, PAUSED);
                self.progress.set_paused(true);
                self.pause.send_replace(true);
                (StatusCode::OK, "paused; what has begun is finished, the slot retains WAL until `walpost resume`\n")
            }
            "resume" => {
                self.pause.send_replace(false);
                self.progress.set_paused(false);
                self.health.well(Part::Pause);
                (StatusCode::OK, "resumed\n")
            }
            "stop" => {
                // a second one is no abort: it may be the first one's, asked again
                self.wish
                    .send_if_modified(|wish| *wish == Wish::Run && std::mem::replace(wish, Wish::Drain) == Wish::Run);
                (StatusCode::ACCEPTED, "stopping: what is in flight is waited for and confirmed\n")
            }
            _ => (StatusCode::NOT_FOUND, "there are /admin/pause, /admin/resume and /admin/stop\n"),
        }
    }
}

/// The routes.
pub fn router(admin: Arc<Admin>) -> Router {
    Router::new().route("/admin/{action}", post(answer)).with_state(admin)
}

async fn answer(
    State(admin): State<Arc<Admin>>,
    Path(action): Path<String>,
    headers: HeaderMap,
) -> (StatusCode, &'static str) {
    if let Some((status, why)) = admin.refuses(&headers) {
        tracing::warn!(status = status.as_u16(), "an admin request was refused");
        return (status, why);
    }
    let (status, said) = admin.act(&action);
    tracing::info!(action, status = status.as_u16(), "told by an admin request");
    (status, said)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admin(token: Option<&str>) -> Admin {
        Admin {
            token: token.map(|token| AdminToken::Text(Secret::new(token))),
            pause: watch::channel(false).0,
            wish: watch::channel(Wish::Run).0,
            health: Arc::default(),
            progress: Arc::default(),
        }
    }

    fn with(value: &str) -> HeaderMap {
        [(AUTHORIZATION, value.parse().unwrap())].into_iter().collect()
    }

    #[test]
    fn nobody_is_let_in_without_the_token() {
        let status = |admin: &Admin, headers: &HeaderMap| admin.refuses(headers).map(|(status, _)| status.as_u16());
        assert_eq!(status(&admin(None), &with("Bearer ")), Some(404));
        let admin = admin(Some("0123456789abcdef"));
        for wrong in ["Bearer 0123456789abcdeF", "Bearer ", "0123456789abcdef", "Basic 0123456789abcdef"] {
            assert_eq!(status(&admin, &with(wrong)), Some(401), "{wrong}");
        }
        assert_eq!(status(&admin, &HeaderMap::new()), Some(401));
        assert_eq!(status(&admin, &with("Bearer 0123456789abcdef")), None);
    }

    #[test]
    fn a_second_stop_does_not_abort_the_first() {
        let admin = admin(None);
        for _ in 0..2 {
            assert_eq!(admin.act("stop").0, StatusCode::ACCEPTED);
            assert_eq!(*admin.wish.borrow(), Wish::Drain);
        }
        assert_eq!(admin.act("drop").0, StatusCode::NOT_FOUND);
    }
}
