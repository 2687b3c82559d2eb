//! Images that appear and disappear, from containerd's event stream.

use std::path::{Path, PathBuf};
use std::time::Duration;

use containerd_client::services::v1::events_client::EventsClient;
use containerd_client::services::v1::{
    ImageCreate, ImageDelete, ImageUpdate, PublishRequest, SubscribeRequest,
};
use containerd_client::types::Envelope;
use prost::Message as _;
use prost_types::Any;
use tokio::time::interval;
use tonic::Streaming;
use tonic::transport::Channel;

use super::namespaced_request;
use crate::Namespace;
use crate::store::ErrorSource;

/// The topics of events of images.
///
/// *Source:* containerd's `metadata/images.go`.
const CREATION_TOPIC: &str = "/images/create";
const UPDATE_TOPIC: &str = "/images/update";
const DELETION_TOPIC: &str = "/images/delete";

/// The topic of the marker that shows that the subscription has started: containerd answers a subscription only with
/// its first event.
const MARKER_TOPIC: &str = "/nodekeel/subscribed";

/// The time after which a marker that was published before the subscription started is published again.
const MARKER_INTERVAL: Duration = Duration::from_millis(100);

/// An image that was created, changed or deleted; by now it may have been again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageEvent {
    /// The namespace.
    pub(crate) namespace: String,
    /// The name.
    pub(crate) name: String,
    /// True if the image was deleted; otherwise it existed.
    pub(crate) is_deletion: bool,
}

/// A subscription to the images of all namespaces.
#[derive(Debug)]
pub(crate) struct ImageEvents {
    socket: PathBuf,
    events: Streaming<Envelope>,
}

/// The event stream of a containerd can't be read, or ended: containerd has exited, or hangs.
#[derive(Debug, thiserror::Error)]
#[error("can't read the event stream of containerd at {socket} (is it running?)")]
pub(crate) struct EventStreamError {
    socket: PathBuf,
    #[source]
    source: ErrorSource,
}

impl ImageEvents {
    /// Subscribes; every event after this has returned is reported.
    pub(crate) async fn subscribe(socket: &Path, namespace: &Namespace) -> Result<Self, EventStreamError> {
        let failed = |source: ErrorSource| EventStreamError { socket: socket.to_owned(), source };
        let channel = containerd_client::connect(socket).await.map_err(|error| failed(error.into()))?;
        let topics = [CREATION_TOPIC, UPDATE_TOPIC, DELETION_TOPIC, MARKER_TOPIC];
        let filters = topics.map(|topic| format!("topic==\"{topic}\"")).to_vec();
        let mut client = EventsClient::new(channel.clone());
        let subscribed = client.subscribe(SubscribeRequest { filters });
        tokio::pin!(subscribed);
        // A marker that is published before the subscription exists is lost, so it is published again and
        // again.
        let mut due = interval(MARKER_INTERVAL);
        let events = loop {
            tokio::select! {
                answer = &mut subscribed => break answer.map_err(|status| failed(status.into()))?.into_inner(),
                _ = due.tick() => publish_marker(&channel, namespace).await.map_err(failed)?,
            }
        };
        Ok(Self { socket: socket.to_owned(), events })
    }

    /// Waits for the next event.
    ///
    /// # Cancel safety
    /// No event is lost when this is dropped.
    pub(crate) async fn next(&mut self) -> Result<ImageEvent, EventStreamError> {
        let failed = |source: ErrorSource| EventStreamError { socket: self.socket.clone(), source };
        loop {
            let event = self.events.message().await.map_err(|status| failed(status.into()))?;
            let event = event.ok_or_else(|| failed("the stream ended".into()))?;
            let payload = event.event.unwrap_or_default().value;
            let name = match event.topic.as_str() {
                CREATION_TOPIC => ImageCreate::decode(&payload[..]).map(|created| created.name),
                UPDATE_TOPIC => ImageUpdate::decode(&payload[..]).map(|updated| updated.name),
                DELETION_TOPIC => ImageDelete::decode(&payload[..]).map(|deleted| deleted.name),
                // A marker: several may have been published before the first one arrived.
                _ => continue,
            };
            let name = name.map_err(|error| failed(error.into()))?;
            let is_deletion = event.topic == DELETION_TOPIC;
            return Ok(ImageEvent { namespace: event.namespace, name, is_deletion });
        }
    }
}

async fn publish_marker(channel: &Channel, namespace: &Namespace) -> Result<(), ErrorSource> {
    let event = Any { type_url: "nodekeel.Subscribed".to_owned(), value: Vec::new() };
    let marker = PublishRequest { topic: MARKER_TOPIC.to_owned(), event: Some(event) };
    EventsClient::new(channel.clone()).publish(namespaced_request(marker, namespace, None)).await?;
    Ok(())
}
