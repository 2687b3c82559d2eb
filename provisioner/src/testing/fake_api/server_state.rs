//! The state of the fake API server.

use std::collections::{BTreeMap, BTreeSet};

use http::StatusCode;
use serde_json::{Value, json};

use crate::testing::objects::merge_patch;

/// The finalizer that protects a PersistentVolume in use. *Source:* Kubernetes, storage object in use
/// protection.
pub(super) const PROTECTION: &str = "kubernetes.io/pv-protection";

/// A kind of object that the server supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ObjectKind {
    /// A PersistentVolumeClaim.
    Claim,
    /// A PersistentVolume.
    Volume,
    /// A StorageClass.
    Class,
    /// An Event.
    Event,
    /// A VolumeAttributesClass.
    AttributesClass,
    /// A Node.
    Node,
    /// A CSIStorageCapacity.
    StorageCapacity,
    /// A CSINode.
    CsiNode,
    /// A Lease.
    Lease,
    /// A Pod.
    Pod,
    /// A VolumeSnapshot.
    Snapshot,
    /// A VolumeSnapshotContent.
    SnapshotContent,
    /// A ConfigMap.
    ConfigMap,
}

/// The verb of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestVerb {
    /// Read one object.
    Get,
    /// List all objects.
    List,
    /// Watch changes.
    Watch,
    /// Create an object.
    Create,
    /// Change an object.
    Patch,
    /// Delete an object.
    Delete,
}

/// The failure of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestFault {
    /// The server rejects it with this HTTP status.
    Status(u16),
    /// The request does not reach the server.
    Unreachable,
    /// The server carries it out, and the response is lost.
    ResponseLost,
    /// The server neither carries it out nor answers.
    NoResponse,
}

impl ObjectKind {
    pub(super) fn from_plural(plural: &str) -> Option<Self> {
        Some(match plural {
            "persistentvolumeclaims" => Self::Claim,
            "persistentvolumes" => Self::Volume,
            "storageclasses" => Self::Class,
            "events" => Self::Event,
            "volumeattributesclasses" => Self::AttributesClass,
            "nodes" => Self::Node,
            "csistoragecapacities" => Self::StorageCapacity,
            "csinodes" => Self::CsiNode,
            "leases" => Self::Lease,
            "pods" => Self::Pod,
            "volumesnapshots" => Self::Snapshot,
            "volumesnapshotcontents" => Self::SnapshotContent,
            "configmaps" => Self::ConfigMap,
            _ => return None,
        })
    }

    fn api_names(self) -> (&'static str, &'static str) {
        match self {
            Self::Claim => ("v1", "PersistentVolumeClaim"),
            Self::Volume => ("v1", "PersistentVolume"),
            Self::Class => ("storage.k8s.io/v1", "StorageClass"),
            Self::Event => ("events.k8s.io/v1", "Event"),
            Self::AttributesClass => ("storage.k8s.io/v1", "VolumeAttributesClass"),
            Self::Node => ("v1", "Node"),
            Self::Pod => ("v1", "Pod"),
            Self::ConfigMap => ("v1", "ConfigMap"),
            Self::StorageCapacity => ("storage.k8s.io/v1", "CSIStorageCapacity"),
            Self::CsiNode => ("storage.k8s.io/v1", "CSINode"),
            Self::Snapshot => ("snapshot.storage.k8s.io/v1", "VolumeSnapshot"),
            Self::SnapshotContent => ("snapshot.storage.k8s.io/v1", "VolumeSnapshotContent"),
            Self::Lease => ("coordination.k8s.io/v1", "Lease"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ObjectKey {
    pub(super) kind: ObjectKind,
    pub(super) namespace: String,
    pub(super) name: String,
}

pub(super) struct PlannedFault {
    pub(super) verb: RequestVerb,
    pub(super) kind: ObjectKind,
    pub(super) fault: RequestFault,
}

struct ObjectChange {
    version: u64,
    event: Value,
}

pub(super) enum NextEvent {
    Event(u64, Value),
    Nothing,
    End,
}

#[derive(Default)]
pub(super) struct ServerState {
    pub(super) objects: BTreeMap<ObjectKey, Value>,
    pub(super) faults: Vec<PlannedFault>,
    pub(super) paused: BTreeSet<ObjectKind>,
    pub(super) requests: Vec<(RequestVerb, ObjectKind)>,
    pub(super) epoch: u64,
    pub(super) version_requests: usize,
    pub(super) is_unreachable: bool,
    version: u64,
    compacted: u64,
    /// The changes by kind: of one kind there may be many, which the watches of another need not skip.
    log: BTreeMap<ObjectKind, Vec<ObjectChange>>,
}

type ObjectResult = Result<Value, StatusCode>;

/// An error as the API server writes it.
pub(super) fn error_status(code: StatusCode) -> Value {
    let reason = match code {
        StatusCode::CONFLICT => "Conflict",
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::FORBIDDEN => "Forbidden",
        StatusCode::GONE => "Expired",
        _ => "",
    };
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code.as_u16(), "reason": reason, "message": reason })
}

impl ServerState {
    /// Counts a request, and returns its fault, if any.
    pub(super) fn record_request(&mut self, verb: RequestVerb, kind: ObjectKind) -> Option<RequestFault> {
        self.requests.push((verb, kind));
        let place = self.faults.iter().position(|failure| (failure.verb, failure.kind) == (verb, kind))?;
        Some(self.faults.remove(place).fault)
    }

    /// The key of the object with this name, in any namespace.
    pub(super) fn find_key(&self, kind: ObjectKind, name: &str) -> ObjectKey {
        let found = self.objects.keys().find(|key| key.kind == kind && key.name == name).cloned();
        found.unwrap_or_else(|| ObjectKey { kind, namespace: String::new(), name: name.to_owned() })
    }

    pub(super) fn list_objects(&self, kind: ObjectKind) -> Vec<Value> {
        self.objects.iter().filter(|(key, _)| key.kind == kind).map(|(_, object)| object.clone()).collect()
    }

    pub(super) fn list_response(&self, kind: ObjectKind) -> Value {
        let (api_version, name) = kind.api_names();
        json!({
            "kind": format!("{name}List"),
            "apiVersion": api_version,
            "metadata": { "resourceVersion": self.version.to_string() },
            "items": self.list_objects(kind),
        })
    }

    pub(super) fn create_object(&mut self, kind: ObjectKind, mut object: Value) -> ObjectResult {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (name, namespace) = (text(&object["metadata"]["name"]), text(&object["metadata"]["namespace"]));
        let key = ObjectKey { kind, namespace, name };
        if key.name.is_empty() {
            return Err(StatusCode::UNPROCESSABLE_ENTITY);
        }
        if self.objects.contains_key(&key) {
            return Err(StatusCode::CONFLICT);
        }
        let (api_version, kind_name) = kind.api_names();
        merge_patch(&mut object, json!({ "apiVersion": api_version, "kind": kind_name }));
        if !object["metadata"]["uid"].is_string() {
            object["metadata"]["uid"] = json!(format!("aaaaaaaa-0000-4000-8000-{:012x}", self.version));
        }
        if kind == ObjectKind::Volume {
            protect_volume(&mut object);
        }
        Ok(self.store_object(key, object, "ADDED"))
    }

    pub(super) fn patch_object(&mut self, key: &ObjectKey, mut patch: Value) -> ObjectResult {
        let mut object = self.objects.get(key).cloned().ok_or(StatusCode::NOT_FOUND)?;
        for field in ["uid", "resourceVersion"] {
            // A UID or a version in a patch is a precondition, and not a change.
            let wanted = patch
                .get_mut("metadata")
                .and_then(Value::as_object_mut)
                .and_then(|metadata| metadata.remove(field));
            if wanted.is_some_and(|wanted| wanted != object["metadata"][field]) {
                return Err(StatusCode::CONFLICT);
            }
        }
        let before = object.clone();
        remove_finalizers(&mut object, &mut patch);
        merge_patch(&mut object, patch);
        // As with the API server, a patch without a change makes no new version and no event.
        if object == before {
            return Ok(object);
        }
        Ok(if can_be_removed(&object) {
            self.remove_object(key, object)
        } else {
            self.store_object(key.clone(), object, "MODIFIED")
        })
    }

    pub(super) fn delete_object(&mut self, key: &ObjectKey, options: &Value) -> ObjectResult {
        let mut object = self.objects.get(key).cloned().ok_or(StatusCode::NOT_FOUND)?;
        for field in ["uid", "resourceVersion"] {
            let wanted = &options["preconditions"][field];
            if wanted.is_string() && *wanted != object["metadata"][field] {
                return Err(StatusCode::CONFLICT);
            }
        }
        if object["metadata"]["deletionTimestamp"].is_string() {
            return Ok(object);
        }
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        // With finalizers, a deletion only sets the timestamp. Without the last of them, the object disappears.
        if !can_be_removed(&object) {
            return Ok(self.store_object(key.clone(), object, "MODIFIED"));
        }
        self.remove_object(key, object);
        Ok(json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
    }

    /// Ends the watches. They can resume, if the event log is not compacted.
    pub(super) fn end_watches(&mut self) {
        self.epoch += 1;
    }

    /// Ends the watches, and compacts the event log.
    pub(super) fn compact_log(&mut self) {
        self.end_watches();
        self.version += 1;
        self.compacted = self.version;
        self.log.clear();
    }

    /// The next event of a watch.
    pub(super) fn next_event(&self, kind: ObjectKind, epoch: u64, after: u64) -> NextEvent {
        if epoch != self.epoch {
            return NextEvent::End;
        }
        // A watch from before the compaction can't be continued: the client has to list again (410 Gone).
        if after < self.compacted {
            let gone = json!({ "type": "ERROR", "object": error_status(StatusCode::GONE) });
            return NextEvent::Event(u64::MAX, gone);
        }
        if self.paused.contains(&kind) {
            return NextEvent::Nothing;
        }
        let log = self.log.get(&kind).map(Vec::as_slice).unwrap_or_default();
        let next = log.get(log.partition_point(|change| change.version <= after));
        next.map_or(NextEvent::Nothing, |change| NextEvent::Event(change.version, change.event.clone()))
    }

    fn store_object(&mut self, key: ObjectKey, mut object: Value, event: &str) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log
            .entry(key.kind)
            .or_default()
            .push(ObjectChange { version: self.version, event: json!({ "type": event, "object": object }) });
        self.objects.insert(key, object.clone());
        object
    }

    fn remove_object(&mut self, key: &ObjectKey, object: Value) -> Value {
        let gone = self.store_object(key.clone(), object, "DELETED");
        self.objects.remove(key);
        gone
    }
}

/// Adds the finalizer that protects a volume in use, as the admission plugin StorageObjectInUseProtection does.
fn protect_volume(volume: &mut Value) {
    let mut finalizers = volume["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    if !finalizers.contains(&json!(PROTECTION)) {
        finalizers.push(json!(PROTECTION));
        volume["metadata"]["finalizers"] = finalizers.into();
    }
}

/// Applies the directive of a strategic merge patch that removes finalizers by their names.
fn remove_finalizers(object: &mut Value, patch: &mut Value) {
    let metadata = patch.get_mut("metadata").and_then(Value::as_object_mut);
    let Some(Value::Array(removed)) =
        metadata.and_then(|metadata| metadata.remove("$deleteFromPrimitiveList/finalizers"))
    else {
        return;
    };
    if let Some(finalizers) = object["metadata"]["finalizers"].as_array_mut() {
        finalizers.retain(|finalizer| !removed.contains(finalizer));
    }
}

/// Returns whether an object is being deleted and has no finalizers.
fn can_be_removed(object: &Value) -> bool {
    let metadata = &object["metadata"];
    let is_kept = metadata["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
    metadata["deletionTimestamp"].is_string() && !is_kept
}
