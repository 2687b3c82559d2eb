//! What the server holds.

use std::collections::{BTreeMap, BTreeSet};

use http::StatusCode;
use serde_json::{Value, json};

use crate::testing::objects::merge;

/// A kind of object that the server knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A PersistentVolumeClaim.
    Claim,
    /// A PersistentVolume.
    Volume,
    /// A StorageClass.
    Class,
    /// An event.
    Event,
}

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verb {
    /// One object.
    Get,
    /// All objects.
    List,
    /// All that happens to them.
    Watch,
    /// A new object.
    Create,
    /// A change.
    Patch,
    /// The end of an object.
    Delete,
}

/// How a request goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It is refused with this HTTP status.
    Status(u16),
    /// It doesn't arrive.
    Unreachable,
    /// It is carried out, and the answer is lost.
    Lost,
    /// It is neither carried out nor answered, and nothing ends the wait.
    Silent,
}

impl Kind {
    pub(super) fn of(plural: &str) -> Option<Self> {
        Some(match plural {
            "persistentvolumeclaims" => Self::Claim,
            "persistentvolumes" => Self::Volume,
            "storageclasses" => Self::Class,
            "events" => Self::Event,
            _ => return None,
        })
    }

    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Claim => ("v1", "PersistentVolumeClaim"),
            Self::Volume => ("v1", "PersistentVolume"),
            Self::Class => ("storage.k8s.io/v1", "StorageClass"),
            Self::Event => ("events.k8s.io/v1", "Event"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) namespace: String,
    pub(super) name: String,
}

pub(super) struct Failure {
    pub(super) verb: Verb,
    pub(super) kind: Kind,
    pub(super) fault: Fault,
}

struct Change {
    version: u64,
    kind: Kind,
    event: Value,
}

pub(super) enum Next {
    Event(u64, Value),
    Nothing,
    End,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) objects: BTreeMap<Key, Value>,
    pub(super) failures: Vec<Failure>,
    pub(super) held: BTreeSet<Kind>,
    pub(super) requests: Vec<(Verb, Kind)>,
    pub(super) epoch: u64,
    version: u64,
    forgotten: u64,
    log: Vec<Change>,
}

type Answer = Result<Value, StatusCode>;

/// An error as the API server writes it.
pub(super) fn status(code: StatusCode) -> Value {
    let reason = match code {
        StatusCode::CONFLICT => "Conflict",
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::FORBIDDEN => "Forbidden",
        StatusCode::GONE => "Expired",
        _ => "",
    };
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code.as_u16(), "reason": reason, "message": reason })
}

impl State {
    /// Counts a request, and tells how it goes wrong.
    pub(super) fn request(&mut self, verb: Verb, kind: Kind) -> Option<Fault> {
        self.requests.push((verb, kind));
        let place = self.failures.iter().position(|failure| (failure.verb, failure.kind) == (verb, kind))?;
        Some(self.failures.remove(place).fault)
    }

    /// The key of the object with this name, in whichever namespace.
    pub(super) fn find(&self, kind: Kind, name: &str) -> Key {
        let found = self.objects.keys().find(|key| key.kind == kind && key.name == name).cloned();
        found.unwrap_or_else(|| Key { kind, namespace: String::new(), name: name.to_owned() })
    }

    pub(super) fn list(&self, kind: Kind) -> Vec<Value> {
        self.objects.iter().filter(|(key, _)| key.kind == kind).map(|(_, object)| object.clone()).collect()
    }

    pub(super) fn list_of(&self, kind: Kind) -> Value {
        let (api_version, name) = kind.names();
        json!({
            "kind": format!("{name}List"),
            "apiVersion": api_version,
            "metadata": { "resourceVersion": self.version.to_string() },
            "items": self.list(kind),
        })
    }

    pub(super) fn create(&mut self, kind: Kind, mut object: Value) -> Answer {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (name, namespace) = (text(&object["metadata"]["name"]), text(&object["metadata"]["namespace"]));
        let key = Key { kind, namespace, name };
        if key.name.is_empty() {
            return Err(StatusCode::UNPROCESSABLE_ENTITY);
        }
        if self.objects.contains_key(&key) {
            return Err(StatusCode::CONFLICT);
        }
        let (api_version, kind_name) = kind.names();
        merge(&mut object, json!({ "apiVersion": api_version, "kind": kind_name }));
        if !object["metadata"]["uid"].is_string() {
            object["metadata"]["uid"] = json!(format!("aaaaaaaa-0000-4000-8000-{:012x}", self.version));
        }
        Ok(self.put(key, object, "ADDED"))
    }

    pub(super) fn patch(&mut self, key: &Key, mut patch: Value) -> Answer {
        let mut object = self.objects.get(key).cloned().ok_or(StatusCode::NOT_FOUND)?;
        for field in ["uid", "resourceVersion"] {
            let wanted = patch
                .get_mut("metadata")
                .and_then(Value::as_object_mut)
                .and_then(|metadata| metadata.remove(field));
            if wanted.is_some_and(|wanted| wanted != object["metadata"][field]) {
                return Err(StatusCode::CONFLICT);
            }
        }
        let before = object.clone();
        merge(&mut object, patch);
        if object == before {
            return Ok(object);
        }
        Ok(match is_over(&object) {
            true => self.drop(key, object),
            false => self.put(key.clone(), object, "MODIFIED"),
        })
    }

    pub(super) fn delete(&mut self, key: &Key, options: &Value) -> Answer {
        let mut object = self.objects.get(key).cloned().ok_or(StatusCode::NOT_FOUND)?;
        let wanted = &options["preconditions"]["uid"];
        if wanted.is_string() && *wanted != object["metadata"]["uid"] {
            return Err(StatusCode::CONFLICT);
        }
        if object["metadata"]["deletionTimestamp"].is_string() {
            return Ok(object);
        }
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        Ok(match is_over(&object) {
            true => {
                self.drop(key, object);
                json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" })
            }
            false => self.put(key.clone(), object, "MODIFIED"),
        })
    }

    /// Ends the watches, and forgets their past.
    pub(super) fn restart(&mut self) {
        self.epoch += 1;
        self.version += 1;
        self.forgotten = self.version;
        self.log.clear();
    }

    /// What a watch tells next.
    pub(super) fn next(&self, kind: Kind, epoch: u64, after: u64) -> Next {
        if epoch != self.epoch {
            return Next::End;
        }
        if after < self.forgotten {
            let gone = json!({ "type": "ERROR", "object": status(StatusCode::GONE) });
            return Next::Event(u64::MAX, gone);
        }
        if self.held.contains(&kind) {
            return Next::Nothing;
        }
        let new = &self.log[self.log.partition_point(|change| change.version <= after)..];
        let next = new.iter().find(|change| change.kind == kind);
        next.map_or(Next::Nothing, |change| Next::Event(change.version, change.event.clone()))
    }

    fn put(&mut self, key: Key, mut object: Value, event: &str) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log.push(Change {
            version: self.version,
            kind: key.kind,
            event: json!({ "type": event, "object": object }),
        });
        self.objects.insert(key, object.clone());
        object
    }

    fn drop(&mut self, key: &Key, object: Value) -> Value {
        let gone = self.put(key.clone(), object, "DELETED");
        self.objects.remove(key);
        gone
    }
}

/// Whether nothing keeps the object any more.
fn is_over(object: &Value) -> bool {
    let metadata = &object["metadata"];
    let is_kept = metadata["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
    metadata["deletionTimestamp"].is_string() && !is_kept
}
