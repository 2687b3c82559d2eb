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

use crate::testing::objects::merge_patch;

mod binder;
mod server_state;

use server_state::{ObjectKey, PlannedFault, ServerState};
pub use server_state::{ObjectKind, RequestFault, RequestVerb};

/// An API server that holds claims, volumes, classes and events in memory: list, watch with resource
/// versions, create, merge patch, delete, conflicts, preconditions, finalizers. Clones are the same server.
///
/// After each change it acts like a cluster's volume controllers: binds a volume to the claim that it names
/// by UID, releases a volume whose claim is deleted, removes the protection finalizer that each volume gets,
/// and changes nothing else. These are changes after the answer: as with a real server, the object in the
/// answer of a deletion is outdated when the client reads it.
#[derive(Clone)]
pub struct FakeApi(Arc<SharedServer>);

struct SharedServer {
    state: Mutex<ServerState>,
    changed: watch::Sender<()>,
}

/// The body of a response; that of a watch lasts as long as the server.
pub type ResponseBody = UnsyncBoxBody<Bytes, Infallible>;

impl Default for FakeApi {
    fn default() -> Self {
        Self(Arc::new(SharedServer { state: Mutex::default(), changed: watch::Sender::new(()) }))
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
                api.answer_request(Request::from_parts(parts, body)).await
            }
        });
        Client::new(service, "default")
    }

    /// Creates an object, as another client would. An object with a UID keeps it.
    ///
    /// # Panics
    /// If it already exists, or has no name.
    pub fn create_object(&self, kind: ObjectKind, object: impl serde::Serialize) -> Value {
        let object = serde_json::to_value(object).expect("an object is JSON");
        self.update_state(|state| state.create_object(kind, object)).expect("a new object")
    }

    /// Changes an object, including its status, by a merge patch, as another client would.
    ///
    /// # Panics
    /// If it does not exist.
    pub fn patch_object(&self, kind: ObjectKind, name: &str, patch: Value) -> Value {
        self.update_state(|state| state.patch_object(&state.find_key(kind, name), patch))
            .expect("an object to change")
    }

    /// Deletes an object, as another client would. Deleting a missing object has no effect.
    pub fn delete_object(&self, kind: ObjectKind, name: &str) {
        let _ = self.update_state(|state| state.delete_object(&state.find_key(kind, name), &Value::Null));
    }

    /// An object by its name, in any namespace.
    pub fn get_object(&self, kind: ObjectKind, name: &str) -> Option<Value> {
        let state = self.lock_state();
        state.objects.get(&state.find_key(kind, name)).cloned()
    }

    /// All objects of a kind, sorted by name.
    pub fn list_objects(&self, kind: ObjectKind) -> Vec<Value> {
        self.lock_state().list_objects(kind)
    }

    /// The reasons of the events about an object, sorted by their first occurrence, with the count of each.
    pub fn event_counts(&self, about: &str) -> Vec<(String, u64)> {
        let mut events = self.list_objects(ObjectKind::Event);
        events.retain(|event| event["regarding"]["name"] == about);
        events.sort_by_key(|event| event["eventTime"].to_string());
        let count = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1);
        events
            .iter()
            .map(|event| (event["reason"].as_str().unwrap_or_default().to_owned(), count(event)))
            .collect()
    }

    /// The notes of the events about an object.
    pub fn event_notes(&self, about: &str) -> Vec<String> {
        let mut events = self.list_objects(ObjectKind::Event);
        events.retain(|event| event["regarding"]["name"] == about);
        events.iter().map(|event| event["note"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// The number of requests by clients, including failed ones.
    pub fn request_count(&self, verb: RequestVerb, kind: ObjectKind) -> usize {
        self.lock_state().requests.iter().filter(|request| **request == (verb, kind)).count()
    }

    /// The number of requests for the server's version, with which clients find out whether it answers.
    pub fn version_request_count(&self) -> usize {
        self.lock_state().version_requests
    }

    /// Makes the next such request fail. Several faults occur in turn.
    pub fn fail_next(&self, verb: RequestVerb, kind: ObjectKind, fault: RequestFault) {
        self.lock_state().faults.push(PlannedFault { verb, kind, fault });
    }

    /// Stops the watches of a kind from reporting events until [`resume_watches`](Self::resume_watches):
    /// simulates a stale cache.
    pub fn pause_watches(&self, kind: ObjectKind) {
        self.lock_state().paused.insert(kind);
    }

    /// Lets the watches of a kind report the events since then.
    pub fn resume_watches(&self, kind: ObjectKind) {
        self.lock_state().paused.remove(&kind);
        self.0.changed.send_replace(());
    }

    /// Ends all watches and compacts the event log: clients have to list again.
    pub fn reset_watches(&self) {
        self.lock_state().compact_log();
        self.0.changed.send_replace(());
    }

    /// Makes the server unreachable, or reachable again: requests fail, and watches end.
    pub fn set_reachable(&self, is_reachable: bool) {
        let mut state = self.lock_state();
        state.is_unreachable = !is_reachable;
        state.end_watches();
        drop(state);
        self.0.changed.send_replace(());
    }

    /// Waits until a condition holds; checks it after each change.
    ///
    /// # Cancel safety
    /// Has no side effects.
    pub async fn wait_until(&self, mut holds: impl FnMut(&Self) -> bool) {
        let mut changed = self.0.changed.subscribe();
        while !holds(self) {
            // Never fails: `self` holds the sender.
            let _ = changed.changed().await;
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, ServerState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_state<T>(&self, change: impl FnOnce(&mut ServerState) -> T) -> T {
        let mut state = self.lock_state();
        let result = change(&mut state);
        binder::run_controllers(&mut state);
        // Unlocked first: those that wake up lock it at once.
        drop(state);
        self.0.changed.send_replace(());
        result
    }

    /// Answers a request as the API server does over HTTP.
    ///
    /// # Errors
    /// A connection error, if a [`RequestFault`] simulates one.
    pub async fn answer_request(&self, request: Request<Bytes>) -> std::io::Result<Response<ResponseBody>> {
        let (parts, body) = request.into_parts();
        if self.lock_state().is_unreachable {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        if parts.uri.path() == "/version" {
            self.lock_state().version_requests += 1;
            return Ok(json_response(Ok(server_version())));
        }
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let Some(call) = ApiRequest::parse(&parts.method, &parts.uri) else {
            return Ok(json_response(Err(StatusCode::NOT_FOUND)));
        };
        // Counted before the answer, so that a test can wait for a request that never gets one.
        let fault = self.lock_state().record_request(call.verb, call.key.kind);
        // Wakes waiters that count requests.
        self.0.changed.send_replace(());
        match fault {
            Some(RequestFault::Status(code)) => {
                return Ok(json_response(Err(
                    StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
                )));
            }
            Some(RequestFault::Unreachable) => return Err(std::io::ErrorKind::ConnectionRefused.into()),
            Some(RequestFault::NoResponse) => return std::future::pending().await,
            Some(RequestFault::ResponseLost) | None => {}
        }
        let response = match call.verb {
            RequestVerb::Watch => return Ok(self.watch_response(&call)),
            RequestVerb::List => Ok(self.lock_state().list_response(call.key.kind)),
            RequestVerb::Get => {
                self.lock_state().objects.get(&call.key).cloned().ok_or(StatusCode::NOT_FOUND)
            }
            RequestVerb::Create => self.update_state(|state| {
                let mut body = body;
                // An object of the whole cluster has none.
                if !call.key.namespace.is_empty() {
                    merge_patch(&mut body, json!({ "metadata": { "namespace": call.key.namespace } }));
                }
                state.create_object(call.key.kind, body)
            }),
            RequestVerb::Patch => {
                let body = call.limit_patch(body);
                self.update_state(|state| state.patch_object(&call.key, body))
            }
            RequestVerb::Delete => self.update_state(|state| state.delete_object(&call.key, &body)),
        };
        match fault {
            // The request was carried out, but the response is lost.
            Some(_) => Err(std::io::ErrorKind::ConnectionReset.into()),
            None => Ok(json_response(response)),
        }
    }

    fn watch_response(&self, call: &ApiRequest) -> Response<ResponseBody> {
        let (kind, epoch) = (call.key.kind, self.lock_state().epoch);
        let start = (self.clone(), self.0.changed.subscribe(), call.version);
        let events = stream::unfold(start, move |(api, mut changed, version)| async move {
            loop {
                let next = api.lock_state().next_event(kind, epoch, version);
                match next {
                    server_state::NextEvent::Event(version, event) => {
                        let mut line = event.to_string().into_bytes();
                        line.push(b'\n');
                        let frame = Ok(Frame::data(Bytes::from(line)));
                        return Some((frame, (api, changed, version)));
                    }
                    server_state::NextEvent::End => return None,
                    server_state::NextEvent::Nothing => {}
                }
                // Never fails: `api` holds the sender.
                let _ = changed.changed().await;
            }
        });
        Response::new(StreamBody::new(events.boxed()).boxed_unsync())
    }
}

struct ApiRequest {
    verb: RequestVerb,
    key: ObjectKey,
    /// The request is for the status of the object.
    is_status: bool,
    version: u64,
}

impl ApiRequest {
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
            [plural] => (ObjectKind::from_plural(plural)?, ""),
            [plural, name] | [plural, name, "status"] => (ObjectKind::from_plural(plural)?, *name),
            _ => return None,
        };
        let query: Vec<(&str, &str)> =
            uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('=')).collect();
        let asked = |key: &str| query.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let verb = match *method {
            Method::GET if asked("watch").is_some() => RequestVerb::Watch,
            Method::GET if name.is_empty() => RequestVerb::List,
            Method::GET => RequestVerb::Get,
            Method::POST => RequestVerb::Create,
            Method::PATCH => RequestVerb::Patch,
            Method::DELETE => RequestVerb::Delete,
            _ => return None,
        };
        let version = asked("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        let is_status = parts.get(2) == Some(&"status");
        Some(Self { verb, key: ObjectKey { kind, namespace, name: name.to_owned() }, is_status, version })
    }

    /// Limits a patch to the status of the object, or to everything else.
    fn limit_patch(&self, mut patch: Value) -> Value {
        if let Some(fields) = patch.as_object_mut() {
            if self.is_status {
                // As the API server: a patch of the status changes no other field, and its metadata are only
                // preconditions.
                fields.retain(|name, _| matches!(name.as_str(), "metadata" | "status"));
                if let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) {
                    metadata.retain(|name, _| matches!(name.as_str(), "uid" | "resourceVersion"));
                }
            } else {
                // The status is a subresource: a patch of the object itself loses it without an error.
                fields.remove("status");
            }
        }
        patch
    }
}

fn server_version() -> Value {
    let fields = [
        "buildDate",
        "compiler",
        "gitCommit",
        "gitTreeState",
        "gitVersion",
        "goVersion",
        "major",
        "minor",
        "platform",
    ];
    fields.iter().map(|field| ((*field).to_owned(), json!(""))).collect::<serde_json::Map<_, _>>().into()
}

fn json_response(result: Result<Value, StatusCode>) -> Response<ResponseBody> {
    let (status, value) = match result {
        Ok(value) => (StatusCode::OK, value),
        Err(status) => (status, server_state::error_status(status)),
    };
    let mut response = Response::new(Full::from(value.to_string()).boxed_unsync());
    *response.status_mut() = status;
    response
}

impl fmt::Debug for FakeApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.lock_state().objects.keys()).finish()
    }
}
