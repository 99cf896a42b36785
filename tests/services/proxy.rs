//! A TCP proxy in front of a server, which can be told to misbehave as networks do.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::AbortHandle,
};

use super::{RUNTIME, complete, run};

/// How the network is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    /// Everything passes.
    Clear,
    /// Nothing passes in either direction; connections stay open, new ones are taken.
    Stalled,
    /// Everything passes later.
    Delayed(Duration),
    /// One byte at a time.
    Dripping,
    /// Requests are forwarded; the first byte of an answer resets its connection.
    CutBeforeAnswer,
    /// New connections are closed at once; those that exist are reset.
    Refusing,
    /// The server's side of each connection is gone, the client is never told; new connections work.
    HalfOpen,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To the server.
    Request,
    /// From the server.
    Answer,
}

/// Sees, and may change, each length-prefixed frame, the length left out. False: ask again in a moment, and hold it so long.
pub type Tamper = dyn FnMut(Way, &mut Vec<u8>) -> bool + Send;

struct State {
    upstream: SocketAddr,
    weather: watch::Sender<Weather>,
    /// Counts up: every connection that is older is reset.
    cuts: watch::Sender<u64>,
    tamper: Mutex<Option<Box<Tamper>>>,
}

/// A proxy on a port of its own; connections end when this is dropped.
pub struct Proxy {
    port: u16,
    state: Arc<State>,
    accepting: AbortHandle,
}

impl Proxy {
    /// Listens in front of a port of 127.0.0.1.
    pub fn before(upstream: u16) -> Self {
        let port = run::free_port();
        let state = Arc::new(State {
            upstream: SocketAddr::from(([127, 0, 0, 1], upstream)),
            weather: watch::Sender::new(Weather::Clear),
            cuts: watch::Sender::new(0),
            tamper: Mutex::default(),
        });
        let listener = complete(async move { TcpListener::bind(("127.0.0.1", port)).await }).expect("a free port");
        let accepting = RUNTIME.spawn(accept(listener, Arc::clone(&state))).abort_handle();
        Self { port, state, accepting }
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes the weather for all connections, present and future.
    pub fn set(&self, weather: Weather) {
        self.state.weather.send_replace(weather);
        if weather == Weather::Refusing {
            self.cut();
        }
    }

    /// Resets all connections; new ones are served.
    pub fn cut(&self) {
        self.state.cuts.send_modify(|count| *count += 1);
    }

    /// Shows every frame to `tamper` from now on.
    pub fn tamper(&self, tamper: impl FnMut(Way, &mut Vec<u8>) -> bool + Send + 'static) {
        *self.state.tamper.lock().expect("no panic while the lock is held") = Some(Box::new(tamper));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    while let Ok((client, _)) = listener.accept().await {
        if *state.weather.borrow() == Weather::Refusing {
            continue; // dropped, that is closed
        }
        tokio::spawn(serve(client, Arc::clone(&state)));
    }
}

async fn serve(client: TcpStream, state: Arc<State>) {
    let (mut cuts, mut weather) = (state.cuts.subscribe(), state.weather.subscribe());
    cuts.borrow_and_update();
    weather.borrow_and_update();
    let Ok(server) = TcpStream::connect(state.upstream).await else { return };
    for socket in [&client, &server] {
        let _ = socket.set_nodelay(true);
    }
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let turned_half_open = async {
        while weather.changed().await.is_ok() {
            if *weather.borrow_and_update() == Weather::HalfOpen {
                return;
            }
        }
        std::future::pending::<()>().await;
    };
    let half_open = tokio::select! {
        _ = cuts.changed() => false,
        () = turned_half_open => true,
        _ = pump(Way::Request, &mut from_client, &mut to_server, &state) => false,
        _ = pump(Way::Answer, &mut from_server, &mut to_client, &state) => false,
    };
    if half_open {
        drop((from_server, to_server));
        let _ = cuts.changed().await;
    }
    // a reset, as from a machine that knows of no such connection
    if let Ok(client) = from_client.reunite(to_client) {
        let _ = socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO));
    }
}

async fn pump(way: Way, from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, state: &State) -> io::Result<()> {
    let mut weather = state.weather.subscribe();
    let (mut chunk, mut partial) = (vec![0; 64 * 1024], Vec::new());
    loop {
        let _ = weather.wait_for(|weather| *weather != Weather::Stalled).await;
        let count = from.read(&mut chunk).await?;
        if count == 0 {
            return Ok(());
        }
        let _ = weather.wait_for(|weather| *weather != Weather::Stalled).await;
        let now = *weather.borrow();
        let bytes = &chunk[..count];
        match now {
            Weather::CutBeforeAnswer if way == Way::Answer => return Ok(()),
            Weather::Delayed(by) => {
                tokio::time::sleep(by).await;
                to.write_all(bytes).await?;
            }
            Weather::Dripping => {
                for byte in bytes {
                    to.write_all(&[*byte]).await?;
                    tokio::task::yield_now().await;
                }
            }
            _ if state.tamper.lock().is_ok_and(|tamper| tamper.is_some()) => {
                partial.extend_from_slice(bytes);
                while let Some(mut frame) = take_frame(&mut partial) {
                    while !shown(state, way, &mut frame) {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    let length = u32::try_from(frame.len()).expect("a frame is small");
                    to.write_all(&[&length.to_be_bytes(), &frame[..]].concat()).await?;
                }
            }
            _ => to.write_all(bytes).await?,
        }
    }
}

fn shown(state: &State, way: Way, frame: &mut Vec<u8>) -> bool {
    state.tamper.lock().expect("no panic in a tamper").as_mut().is_none_or(|tamper| tamper(way, frame))
}

fn take_frame(partial: &mut Vec<u8>) -> Option<Vec<u8>> {
    let length = u32::from_be_bytes(*partial.first_chunk::<4>()?) as usize;
    partial.get(4..4 + length)?;
    let mut frame: Vec<u8> = partial.drain(..4 + length).collect();
    frame.drain(..4);
    Some(frame)
}
