//! The socket and its framing: bytes in, whole messages out.
//!
//! Owns the read and the write buffer. Both survive a dropped future, so everything here that is `async` may be dropped
//! inside `select!` (cancel-safe): what was read stays in the buffer, what was not written stays in the other.
//!
//! The hard part: at full speed the walsender makes one `send` a message. A reader that wakes for each costs itself and
//! the database's core dearly, so [`Wire::drive`] lets bytes pile up a moment while the stream is behind.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
    time::Instant,
};
use tokio_openssl::SslStream;

use crate::fault;

/// Room for one read. Larger buffers bought nothing (docs/decisions/0003).
const READ_BYTES: usize = 64 * 1024;
/// A read shorter than this, while behind, is worth a pause.
const SHORT_READ_BYTES: usize = READ_BYTES / 2;
/// How long bytes may pile up while behind: a few hundred messages at full speed.
const PILE_UP: Duration = Duration::from_micros(400);
/// A read buffer that has grown beyond this is given back.
const KEPT_BYTES: usize = 4 * 1024 * 1024;
/// The largest message Postgres can send: 1 GB and the frame around it.
const MAX_MESSAGE_BYTES: usize = 0x4000_0000 + 1024;

/// A socket to a server.
pub enum Socket {
    /// Plain TCP.
    Tcp(TcpStream),
    /// A Unix-domain socket.
    Unix(UnixStream),
    /// TLS over TCP.
    Tls(Box<SslStream<TcpStream>>),
}

/// A socket with its buffers.
pub struct Wire {
    socket: Socket,
    input: BytesMut,
    output: BytesMut,
    last_read: usize,
    last_received: Instant,
    notified: bool,
}

/// A whole message from the server: its tag and its body, still in the read buffer.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// The kind of message.
    pub tag: u8,
    /// Everything behind the length.
    pub body: &'a [u8],
    /// Bytes to drop from the buffer when done.
    pub size: usize,
}

/// The whole message at the front of some bytes, if it has arrived.
pub fn frame(bytes: &[u8]) -> io::Result<Option<Frame<'_>>> {
    let Some(header) = bytes.first_chunk::<5>() else { return Ok(None) };
    let [tag, length @ ..] = *header;
    let length = u32::from_be_bytes(length) as usize;
    if !(4..=MAX_MESSAGE_BYTES).contains(&length) {
        let text = format!("message {:?} claims {length} bytes: this is no Postgres server", tag as char);
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let size = length + 1;
    Ok(bytes.get(5..size).map(|body| Frame { tag, body, size }))
}

impl Wire {
    /// Wraps a connected socket.
    pub fn new(socket: Socket) -> Self {
        let (input, output) = (BytesMut::with_capacity(READ_BYTES), BytesMut::with_capacity(1024));
        Self { socket, input, output, last_read: READ_BYTES, last_received: Instant::now(), notified: false }
    }

    /// The next whole message, if it has arrived. It stays until [`Self::consume`].
    pub fn peek(&self) -> io::Result<Option<Frame<'_>>> {
        frame(&self.input)
    }

    /// Drops the message that [`Self::peek`] showed.
    pub fn consume(&mut self) {
        if let Ok(Some(Frame { size, .. })) = self.peek() {
            self.input.advance(size);
            if self.input.capacity() > KEPT_BYTES && self.input.len() < READ_BYTES {
                self.input = BytesMut::from(&self.input[..]); // a giant message's memory is not kept
            }
        }
    }

    /// Takes note of a message of this tag where it is a notification.
    pub(super) fn note_notification(&mut self, tag: u8) {
        self.notified |= tag == b'A';
    }

    /// Whether there was a notification since the last question.
    pub(super) fn take_notification(&mut self) -> bool {
        std::mem::take(&mut self.notified)
    }

    /// Where to append what shall be sent; [`Self::drive`] sends it.
    pub fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// Whether anything waits to be sent.
    pub fn owes(&self) -> bool {
        !self.output.is_empty()
    }

    /// The read buffer, for parsers that take messages from its front.
    pub fn input(&mut self) -> &mut BytesMut {
        &mut self.input
    }

    /// When bytes last arrived.
    pub fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Takes the time in which nothing was read on purpose out of the silence.
    pub fn forgive_silence(&mut self) {
        self.last_received = Instant::now();
    }

    /// Sends what waits in the output; with `read`, returns once something more has arrived, else once all is sent.
    ///
    /// `behind` says that the stream is not at the log's end. Then a short read is followed by a pause of the whole
    /// thread, which is the pipeline's own: 0.4 ms is finer than the runtime's timer, and nothing else runs there.
    pub async fn drive(&mut self, read: bool, behind: bool) -> io::Result<()> {
        if read && behind && self.last_read < SHORT_READ_BYTES {
            std::thread::sleep(PILE_UP);
        }
        std::future::poll_fn(|context| self.poll_drive(context, read)).await
    }

    fn poll_drive(&mut self, context: &mut Context<'_>, read: bool) -> Poll<io::Result<()>> {
        let mut sent = Poll::Ready(());
        let wrote = !self.output.is_empty();
        while !self.output.is_empty() {
            match Pin::new(&mut self.socket).poll_write(context, &self.output) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => self.output.advance(written),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    sent = Poll::Pending;
                    break;
                }
            }
        }
        if self.output.is_empty() {
            if wrote {
                fault::point("after_status");
            }
            // a TLS stream may hold a record back; for the others this is free
            if let Poll::Ready(Err(error)) = Pin::new(&mut self.socket).poll_flush(context) {
                return Poll::Ready(Err(error));
            }
        }
        if read { self.poll_read(context) } else { sent.map(Ok) }
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.input.capacity() - self.input.len() < READ_BYTES / 4 {
            self.input.reserve(READ_BYTES);
        }
        let before = self.input.len();
        // the future keeps nothing between polls, so a new one each time is the same
        ready!(std::pin::pin!(self.socket.read_buf(&mut self.input)).poll(context))?;
        self.last_read = self.input.len() - before;
        if self.last_read == 0 {
            let text = "the server closed the connection";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::UnexpectedEof, text)));
        }
        self.last_received = Instant::now();
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn pair() -> (Wire, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Wire::new(Socket::Unix(ours)), theirs)
    }

    #[tokio::test]
    async fn a_message_is_shown_only_when_it_is_whole() {
        let (mut wire, mut server) = pair();
        for byte in b"k\0\0\0\x06ab" {
            assert!(wire.peek().unwrap().is_none());
            server.write_all(&[*byte]).await.unwrap();
            wire.drive(true, false).await.unwrap();
        }
        let frame = wire.peek().unwrap().unwrap();
        assert_eq!((frame.tag, frame.body), (b'k', &b"ab"[..]));
        wire.consume();
        assert!(wire.peek().unwrap().is_none());
    }

    #[tokio::test]
    async fn absurd_lengths_are_errors_and_cost_no_memory() {
        for length in [0_u32, 3, 0x7FFF_FFFF, u32::MAX] {
            let (mut wire, mut server) = pair();
            server.write_all(&[&b"d"[..], &length.to_be_bytes()].concat()).await.unwrap();
            wire.drive(true, false).await.unwrap();
            assert!(wire.peek().is_err(), "length {length} was believed");
            assert!(wire.input.capacity() <= 2 * READ_BYTES);
        }
    }

    #[tokio::test]
    async fn without_read_only_the_output_moves() {
        let (mut wire, mut server) = pair();
        server.write_all(b"d\0\0\0\x04").await.unwrap();
        wire.output().extend_from_slice(b"status");
        wire.drive(false, false).await.unwrap();
        assert!(wire.peek().unwrap().is_none(), "the socket was read");
        let mut sent = [0; 6];
        server.read_exact(&mut sent).await.unwrap();
        assert_eq!(&sent, b"status");
    }

    #[tokio::test]
    async fn a_closed_connection_is_an_error() {
        let (mut wire, server) = pair();
        drop(server);
        assert_eq!(wire.drive(true, false).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
