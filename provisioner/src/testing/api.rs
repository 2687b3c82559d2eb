//! An API server in memory, behind a `kube::Client`.

use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::testing::objects::merge;

mod binder;
mod state;

use state::{Failure, Key, State};
pub use state::{Fault, Kind, Verb};

/// An API server that holds claims, volumes, classes and events in memory: list, watch with resource versions, create,
/// merge patch, delete, conflicts, preconditions, finalizers. Clones are the same server.
///
/// After each change it does what the controllers of a cluster do: binds a volume to the claim that it names by UID, releases
/// one whose claim is gone, lets go of what it protects, and never touches anything else.
#[derive(Clone)]
pub struct FakeApi(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

/// The body of an answer; a watch's goes on as long as the server.
pub type AnyBody = UnsyncBoxBody<Bytes, Infallible>;

impl Default for FakeApi {
    fn default() -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), changed: watch::Sender::new(()) }))
    }
}

impl FakeApi {
    /// A client of this server.
    pub fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request| {
            let api = api.clone();
            async move {
                let (parts, body): (_, Body) = Request::into_parts(request);
                let body = body.collect_bytes().await.map_err(std::io::Error::other)?;
                api.answer(Request::from_parts(parts, body)).await
            }
        });
        Client::new(service, "default")
    }

    /// Creates an object, as somebody else would. What has a UID keeps it.
    ///
    /// # Panics
    /// It exists already, or has no name.
    pub fn create(&self, kind: Kind, object: impl serde::Serialize) -> Value {
        let object = serde_json::to_value(object).expect("an object is JSON");
        self.change(|state| state.create(kind, object)).expect("a new object")
    }

    /// Changes an object by a merge patch, as somebody else would; also its status.
    ///
    /// # Panics
    /// It doesn't exist.
    pub fn patch(&self, kind: Kind, name: &str, patch: Value) -> Value {
        self.change(|state| state.patch(&state.find(kind, name), patch)).expect("an object to change")
    }

    /// Deletes an object, as somebody else would. One that is gone stays gone.
    pub fn delete(&self, kind: Kind, name: &str) {
        let _ = self.change(|state| state.delete(&state.find(kind, name), &Value::Null));
    }

    /// An object by its name, in whichever namespace.
    pub fn get(&self, kind: Kind, name: &str) -> Option<Value> {
        let state = self.state();
        state.objects.get(&state.find(kind, name)).cloned()
    }

    /// All objects of a kind, in the order of their names.
    pub fn list(&self, kind: Kind) -> Vec<Value> {
        self.state().list(kind)
    }

    /// The reasons of the events about an object, in the order of their first time, with how often each was told.
    pub fn events(&self, about: &str) -> Vec<(String, u64)> {
        let mut events = self.list(Kind::Event);
        events.retain(|event| event["regarding"]["name"] == about);
        events.sort_by_key(|event| event["eventTime"].to_string());
        let count = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1);
        events
            .iter()
            .map(|event| (event["reason"].as_str().unwrap_or_default().to_owned(), count(event)))
            .collect()
    }

    /// The notes of the events about an object.
    pub fn notes(&self, about: &str) -> Vec<String> {
        let mut events = self.list(Kind::Event);
        events.retain(|event| event["regarding"]["name"] == about);
        events.iter().map(|event| event["note"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// How many requests of this kind were made by clients, failed ones included.
    pub fn requests(&self, verb: Verb, kind: Kind) -> usize {
        self.state().requests.iter().filter(|request| **request == (verb, kind)).count()
    }

    /// Lets the next request of this kind go wrong. Several faults are used up in turn.
    pub fn fail_next(&self, verb: Verb, kind: Kind, fault: Fault) {
        self.state().failures.push(Failure { verb, kind, fault });
    }

    /// Keeps the watches of a kind from telling anything, until [`release`](Self::release): what a stale cache is.
    pub fn hold(&self, kind: Kind) {
        self.state().held.insert(kind);
    }

    /// Lets the watches of a kind tell what has happened since.
    pub fn release(&self, kind: Kind) {
        self.state().held.remove(&kind);
        self.0.changed.send_replace(());
    }

    /// Ends all watches, and forgets what they would have told: who watches has to list again.
    pub fn restart(&self) {
        self.state().restart();
        self.0.changed.send_replace(());
    }

    /// Waits until something holds, looking again after each change.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn until(&self, mut holds: impl FnMut(&Self) -> bool) {
        let mut changed = self.0.changed.subscribe();
        while !holds(self) {
            // The sender is held here.
            let _ = changed.changed().await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state();
        let result = change(&mut state);
        binder::control(&mut state);
        drop(state);
        self.0.changed.send_replace(());
        result
    }

    /// Answers a request, as an HTTP server of this API would.
    ///
    /// # Errors
    /// The connection's, where a [`Fault`] asks for one.
    pub async fn answer(&self, request: Request<Bytes>) -> std::io::Result<Response<AnyBody>> {
        let (parts, body) = request.into_parts();
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let Some(call) = Call::parse(&parts.method, &parts.uri) else {
            return Ok(respond(Err(StatusCode::NOT_FOUND)));
        };
        let fault = self.state().request(call.verb, call.key.kind);
        // Whoever counts requests looks again.
        self.0.changed.send_replace(());
        match fault {
            Some(Fault::Status(code)) => {
                return Ok(respond(Err(
                    StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
                )));
            }
            Some(Fault::Unreachable) => return Err(std::io::ErrorKind::ConnectionRefused.into()),
            Some(Fault::Silent) => return std::future::pending().await,
            Some(Fault::Lost) | None => {}
        }
        let response = match call.verb {
            Verb::Watch => return Ok(self.watch(&call)),
            Verb::List => Ok(self.state().list_of(call.key.kind)),
            Verb::Get => self.state().objects.get(&call.key).cloned().ok_or(StatusCode::NOT_FOUND),
            Verb::Create => self.change(|state| {
                let mut body = body;
                merge(&mut body, json!({ "metadata": { "namespace": call.key.namespace } }));
                state.create(call.key.kind, body)
            }),
            Verb::Patch => self.change(|state| state.patch(&call.key, body)),
            Verb::Delete => self.change(|state| state.delete(&call.key, &body)),
        };
        match fault {
            // It has happened, but nobody hears of it.
            Some(_) => Err(std::io::ErrorKind::ConnectionReset.into()),
            None => Ok(respond(response)),
        }
    }

    fn watch(&self, call: &Call) -> Response<AnyBody> {
        let (kind, epoch) = (call.key.kind, self.state().epoch);
        let start = (self.clone(), self.0.changed.subscribe(), call.version);
        let events = stream::unfold(start, move |(api, mut changed, version)| async move {
            loop {
                let next = api.state().next(kind, epoch, version);
                match next {
                    state::Next::Event(version, event) => {
                        let mut line = event.to_string().into_bytes();
                        line.push(b'\n');
                        let frame = Ok(Frame::data(Bytes::from(line)));
                        return Some((frame, (api, changed, version)));
                    }
                    state::Next::End => return None,
                    state::Next::Nothing => {}
                }
                // The sender is in the server, which is held here.
                let _ = changed.changed().await;
            }
        });
        Response::new(StreamBody::new(events.boxed()).boxed_unsync())
    }
}

/// What a request asks for.
struct Call {
    verb: Verb,
    key: Key,
    version: u64,
}

impl Call {
    fn parse(method: &Method, uri: &http::Uri) -> Option<Self> {
        let mut parts: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
        parts.drain(..if parts.first() == Some(&"api") { 2 } else { 3 }.min(parts.len()));
        let namespace = match parts.as_slice() {
            ["namespaces", namespace, _, ..] => (*namespace).to_owned(),
            _ => String::new(),
        };
        if !namespace.is_empty() {
            parts.drain(..2);
        }
        let (kind, name) = match parts.as_slice() {
            [plural] => (Kind::of(plural)?, ""),
            [plural, name] => (Kind::of(plural)?, *name),
            _ => return None,
        };
        let query: Vec<(&str, &str)> =
            uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('=')).collect();
        let asked = |key: &str| query.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let verb = match *method {
            Method::GET if asked("watch").is_some() => Verb::Watch,
            Method::GET if name.is_empty() => Verb::List,
            Method::GET => Verb::Get,
            Method::POST => Verb::Create,
            Method::PATCH => Verb::Patch,
            Method::DELETE => Verb::Delete,
            _ => return None,
        };
        let version = asked("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        Some(Self { verb, key: Key { kind, namespace, name: name.to_owned() }, version })
    }
}

fn respond(result: Result<Value, StatusCode>) -> Response<AnyBody> {
    let (status, value) = match result {
        Ok(value) => (StatusCode::OK, value),
        Err(status) => (status, state::status(status)),
    };
    let mut response = Response::new(Full::from(value.to_string()).boxed_unsync());
    *response.status_mut() = status;
    response
}

impl fmt::Debug for FakeApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.state().objects.keys()).finish()
    }
}
