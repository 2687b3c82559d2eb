//! Requests to a Tang server: one for each connection, bounded in time and size.

use std::pin::pin;
use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use nodekeel_localstorage::tang::{ANSWER_LIMIT, Advertisement, Binding, Recovery};
use nodekeel_localstorage::volume::UnlockKey;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::error::{ServerProblem, TangServerError};
use super::server::TangServer;

/// The time for a whole request. A server answers within milliseconds; `nodectl health` names one that does not within 5 s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

impl TangServer {
    /// The advertisement of this server, signed by the configured key.
    pub(super) async fn advertisement(&self, known: &[Binding]) -> Result<Advertisement, TangServerError> {
        let answer = match self.request(Method::GET, &Advertisement::path(&self.signer), String::new()).await
        {
            Err(ServerProblem::Status(StatusCode::NOT_FOUND)) => {
                Err(ServerProblem::NoSigner { key: self.signer })
            }
            answer => answer,
        };
        let verify = |answer: Vec<u8>| Advertisement::verify(&answer, &self.signer, known);
        answer
            .and_then(|answer| verify(answer).map_err(ServerProblem::Protocol))
            .map_err(|problem| self.error(problem))
    }

    /// Recovers the key of a binding.
    pub(super) async fn recover(&self, binding: &Binding) -> Result<UnlockKey, TangServerError> {
        let recovered = async {
            let recovery = binding.start_recovery().map_err(ServerProblem::Protocol)?;
            let answer = match self.request(Method::POST, &recovery.path(), recovery.request()).await {
                Err(ServerProblem::Status(StatusCode::NOT_FOUND)) => {
                    Err(ServerProblem::KeyGone { key: binding.key_id() })
                }
                answer => answer,
            }?;
            let secret = recovery.finish(&answer).map_err(ServerProblem::Protocol)?;
            UnlockKey::from_bytes(&secret).map_err(|_| ServerProblem::OtherKey)
        };
        recovered.await.map_err(|problem| self.error(problem))
    }

    pub(super) fn error(&self, problem: ServerProblem) -> TangServerError {
        TangServerError { url: self.url.clone(), problem }
    }

    async fn request(&self, method: Method, path: &str, body: String) -> Result<Vec<u8>, ServerProblem> {
        let answer = timeout(REQUEST_TIMEOUT, self.request_unbounded(method, path, body)).await;
        answer.unwrap_or(Err(ServerProblem::Timeout { seconds: REQUEST_TIMEOUT.as_secs() }))
    }

    async fn request_unbounded(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<Vec<u8>, ServerProblem> {
        let stream = TcpStream::connect(self.url.endpoint()).await.map_err(ServerProblem::Connect)?;
        let mut builder = http1::Builder::new();
        builder.max_buf_size(ANSWER_LIMIT);
        let (mut sender, connection) =
            builder.handshake(TokioIo::new(stream)).await.map_err(ServerProblem::Http)?;
        let mut request = Request::new(body);
        *request.method_mut() = method;
        // The URL was parsed, and the rest of the path is base64url.
        *request.uri_mut() = self.url.path_of(path).parse().unwrap_or_default();
        for (name, value) in
            [(HOST, self.url.authority()), (CONNECTION, "close"), (CONTENT_TYPE, Recovery::CONTENT_TYPE)]
        {
            request.headers_mut().extend(value.parse().ok().map(|value| (name, value)));
        }
        let answer = async {
            let answer = sender.send_request(request).await.map_err(ServerProblem::Http)?;
            if answer.status() != StatusCode::OK {
                return Err(ServerProblem::Status(answer.status()));
            }
            let body = Limited::new(answer.into_body(), ANSWER_LIMIT).collect().await;
            let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
                Ok(error) => ServerProblem::Http(*error),
                Err(_) => ServerProblem::TooLarge { limit: ANSWER_LIMIT },
            })?;
            Ok(body.to_bytes().to_vec())
        };
        let mut answer = pin!(answer);
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            // The server has closed the connection: all that it has sent is there.
            _ = connection => answer.await,
        }
    }
}
