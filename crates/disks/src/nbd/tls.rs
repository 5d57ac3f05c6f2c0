//! TLS: the credentials and demands of a client, and the stream that goes through it.

use std::fs::File;
use std::io::{self, BufRead, ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockio::file::open_regular;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore};

use super::handshake::Stream;
use super::options::{NbdAddress, NbdOptions, NbdTls};
use crate::secret_heap::with_secrets;

/// The places where distributions keep the certificates of trusted authorities.
const SYSTEM_AUTHORITIES: [&str; 2] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// The most ranges of one system call.
const RANGES_MAX: usize = 1024;

/// The most ciphertext that one system call receives.
const INCOMING_BYTES: usize = 128 << 10;

/// Agrees on TLS with the server and calls `negotiate` with the stream inside. The files of the
/// options are read each time, so that they can be renewed.
///
/// # Errors
///
/// The file that cannot be used and the reason, or the error of `negotiate`.
pub(super) fn agree<T>(
    options: &NbdOptions,
    tls: &NbdTls,
    stream: &mut (impl Read + Write),
    negotiate: impl FnOnce(&mut dyn Stream) -> Result<T, String>,
) -> Result<(Tls, T), String> {
    // The library copies the private key, and derives the keys of the connection.
    with_secrets(|| {
        let mut connection = client(options, tls)?;
        let agreed = connection.complete_io(stream).map_err(advised);
        agreed.map_err(|error| format!("cannot agree on TLS with the server: {error}"))?;
        let mut inside = Unproven(rustls::Stream::new(&mut connection, stream));
        let negotiated = negotiate(&mut inside)?;
        Ok((Tls::new(connection), negotiated))
    })
}

/// Makes a client with the demands of the options.
fn client(options: &NbdOptions, tls: &NbdTls) -> Result<ClientConnection, String> {
    let name = match (&tls.hostname, &options.address) {
        (Some(name), _) | (None, NbdAddress::Tcp { host: name, .. }) => name,
        (None, NbdAddress::Unix(_)) => {
            return Err("TLS over a Unix socket needs the name in the server's certificate; set \
                        tls-hostname=NAME"
                .to_owned());
        }
    };
    let name = ServerName::try_from(name.clone())
        .map_err(|_| format!("'{name}' cannot be the name in a certificate; set tls-hostname"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("cannot set up TLS: {error}"))?
        .with_root_certificates(authorities(tls)?);
    let own = tls.certificates.as_ref().map(|folder| folder.join("client-cert.pem"));
    let config = match own.filter(|path| path.exists()) {
        None => config.with_no_client_auth(),
        Some(path) => {
            let key = path.with_file_name("client-key.pem");
            let secret = private_key(&key)?;
            let chain = certificates(&path)?;
            config.with_client_auth_cert(chain, secret).map_err(|error| unusable(&path, &error))?
        }
    };
    ClientConnection::new(Arc::new(config), name)
        .map_err(|error| format!("cannot set up TLS: {error}"))
}

fn authorities(tls: &NbdTls) -> Result<RootCertStore, String> {
    let path = match &tls.certificates {
        Some(folder) => folder.join("ca-cert.pem"),
        None => {
            let found = SYSTEM_AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
            found.ok_or(
                "this machine has no CA certificates; name a folder with ca-cert.pem in \
                 tls-certificates=FOLDER",
            )?
        }
    };
    let mut store = RootCertStore::empty();
    let (taken, _) = store.add_parsable_certificates(certificates(&path)?);
    if taken == 0 {
        return Err(no_pem(&path, "certificates"));
    }
    Ok(store)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_reader_iter(open(path)?).collect();
    read.map_err(|_| no_pem(path, "certificates"))
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_reader(open(path)?).map_err(|_| no_pem(path, "private key"))
}

fn open(path: &Path) -> Result<File, String> {
    open_regular(path).map_err(|error| {
        let path = path.display();
        format!("cannot open {path}: {error}; tls-certificates must name a folder with this file")
    })
}

/// Adds advice for the user to a failure of the TLS set-up.
fn advised(error: io::Error) -> io::Error {
    let advice = match error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(problem)) => match problem {
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "set tls-hostname to a name in the certificate"
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "put the certificate of the CA that signed it into ca-cert.pem in the folder of \
                 tls-certificates"
            }
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => {
                "renew the server's certificate, and check the clock of this machine"
            }
            // An old version of certificates, or that of an authority in place of the server's own.
            CertificateError::Other(_) => {
                "the server needs a certificate of its own with a subjectAltName; \
                 docs/guide/disks-network.md makes one"
            }
            _ => return error,
        },
        Some(rustls::Error::AlertReceived(_)) => SERVER_REFUSED,
        Some(_) => return error,
        None => match error.kind() {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => {
                SERVER_REFUSED
            }
            _ => return error,
        },
    };
    io::Error::new(error.kind(), format!("{error}; {advice}"))
}

const SERVER_REFUSED: &str = "the server has refused this client; its log may have the reason: it \
                              may require a certificate (client-cert.pem and client-key.pem in the \
                              folder of tls-certificates), or shared keys, which are not supported";

/// The stream inside TLS while the server may yet refuse this client: with TLS 1.3, it checks a
/// client's certificate when the client has finished its part.
struct Unproven<'a, S: Read + Write>(rustls::Stream<'a, ClientConnection, S>);

impl<S: Read + Write> Read for Unproven<'_, S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes).map_err(advised)
    }
}

impl<S: Read + Write> Write for Unproven<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(advised)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(advised)
    }
}

/// Leaves out the parser's own words: they may contain a line of the file, which may be a key.
fn no_pem(path: &Path, what: &str) -> String {
    unusable(path, &format_args!("it has no {what} in PEM format, or is damaged"))
}

fn unusable(path: &Path, error: &dyn std::fmt::Display) -> String {
    format!("cannot use {} for TLS: {error}", path.display())
}

/// The TLS of a connection that does not wait.
pub(super) struct Tls {
    connection: ClientConnection,
    incoming: Incoming,
}

impl Tls {
    fn new(mut connection: ClientConnection) -> Self {
        // The caller bounds its data.
        connection.set_buffer_limit(None);
        Self { connection, incoming: Incoming::default() }
    }

    /// Returns true if ciphertext waits for room in the socket.
    pub(super) fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    /// Sends the ciphertext.
    ///
    /// # Errors
    ///
    /// Errors of the socket; `WouldBlock` if it has no room.
    pub(super) fn push(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut Outgoing(socket))?;
        }
        Ok(())
    }

    /// Encrypts all of these bytes.
    ///
    /// # Errors
    ///
    /// If TLS can no longer be used.
    pub(super) fn encrypt(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connection.writer().write_all(bytes)
    }

    /// Receives and decrypts bytes for `take`, which returns the number that it took. Returns their
    /// sum; 0 at the end.
    ///
    /// # Errors
    ///
    /// As for [`push`](Self::push), and for invalid ciphertext. `Interrupted`: much has come
    /// without content, and other tasks have their turn first.
    pub(super) fn pull(
        &mut self,
        socket: BorrowedFd<'_>,
        mut take: impl FnMut(&[u8]) -> usize,
    ) -> io::Result<usize> {
        let (mut taken, mut fetched) = (0, 0);
        loop {
            match self.connection.reader().fill_buf() {
                Ok([]) => return Ok(taken),
                Ok(bytes) => {
                    let part = take(bytes);
                    self.connection.reader().consume(part);
                    taken += part;
                    if part == 0 {
                        return Ok(taken);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock && taken > 0 => {
                    return Ok(taken);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if fetched >= INCOMING_BYTES {
                        return Err(ErrorKind::Interrupted.into());
                    }
                    let mut stream = Fetch { socket, incoming: &mut self.incoming };
                    match self.connection.read_tls(&mut stream)? {
                        0 => return Ok(0),
                        bytes => fetched += bytes,
                    }
                    let state = self.connection.process_new_packets();
                    state.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Ciphertext that was received and not decrypted.
#[derive(Default)]
struct Incoming {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

struct Fetch<'a> {
    socket: BorrowedFd<'a>,
    incoming: &'a mut Incoming,
}

impl Read for Fetch<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let incoming = &mut *self.incoming;
        if incoming.start == incoming.end {
            incoming.bytes.resize(INCOMING_BYTES, 0);
            let received = rustix::net::recv(self.socket, &mut incoming.bytes[..], DONT_WAIT)?;
            (incoming.start, incoming.end) = (0, received.1);
        }
        let here = incoming.bytes.get(incoming.start..incoming.end).unwrap_or_default();
        let part = here.len().min(bytes.len());
        bytes[..part].copy_from_slice(&here[..part]);
        incoming.start += part;
        Ok(part)
    }
}

const DONT_WAIT: RecvFlags = RecvFlags::DONTWAIT;

struct Outgoing<'a>(BorrowedFd<'a>);

impl Write for Outgoing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let parts = parts.get(..RANGES_MAX).unwrap_or(parts);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut nothing = SendAncillaryBuffer::default();
        Ok(rustix::net::sendmsg(self.0.as_fd(), parts, &mut nothing, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_damaged_key_is_not_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("client-key.pem");
        for text in ["-----BEGIN PRIVATE KEY hidden\nhidden\n", "hidden", "-----BEGIN hidden"] {
            std::fs::write(&path, text).unwrap();
            let of_key = private_key(&path).map(drop).unwrap_err();
            // A file without a certificate has none that is damaged.
            let of_certificates = certificates(&path).map(|found| assert!(found.is_empty()));
            assert_eq!(of_certificates.is_ok(), text == "hidden", "{text}");
            for error in [of_key].into_iter().chain(of_certificates.err()) {
                let numbers = format!("{:?}", b"hidden").replace(['[', ']'], "");
                assert!(!error.contains("hidden") && !error.contains(&numbers), "{error}");
                assert!(error.contains("client-key.pem"), "{error}");
            }
        }
    }

    /// Opening a pipe would wait for its writer.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_pipe_in_the_place_of_a_certificate_or_key_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca-cert.pem");
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        // So that a faulty open fails this test instead of holding it.
        let _writer = File::options().read(true).write(true).open(&path).unwrap();
        let error = open(&path).map(drop).unwrap_err();
        assert!(error.contains("ca-cert.pem") && error.contains("not a regular file"), "{error}");
        assert!(error.contains("tls-certificates"), "{error}");
    }

    /// Notes if memory for secrets is allocated when the client begins, and hangs up.
    #[derive(Default)]
    struct Probe {
        has_secrets: Option<bool>,
    }

    impl Read for Probe {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Ok(0)
        }
    }

    impl Write for Probe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.has_secrets = Some(crate::secret_heap::has_secrets());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn keys_of_a_connection_are_secrets() {
        if !SYSTEM_AUTHORITIES.iter().any(|path| Path::new(path).exists()) {
            eprintln!("skipped: this machine has no CA certificates");
            return;
        }
        let tls = NbdTls::default();
        let options = NbdOptions {
            address: NbdAddress::Tcp { host: "localhost".to_owned(), port: 10809 },
            export: String::new(),
            connections: 1,
            deadline: None,
            distrust: false,
            tls: Some(tls.clone()),
        };
        let mut probe = Probe::default();
        agree(&options, &tls, &mut probe, |_| Ok(())).map(drop).unwrap_err();
        assert_eq!(probe.has_secrets, Some(true));
        assert!(!crate::secret_heap::has_secrets());
    }
}
