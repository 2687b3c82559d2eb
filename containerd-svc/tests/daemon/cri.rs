//! As much of Kubernetes' runtime interface as runs a container of a pod.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use prost::Message;
use tokio::runtime::Handle;
use tokio::task::block_in_place;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

/// The image of [`image`](crate::harness::pod_image), in which pods and their containers live.
pub(crate) const IMAGE: &str = "localhost/pod:1";

/// *Source:* `NamespaceMode.NODE`: no plugin of networks is needed.
const NODE: i32 = 2;

/// *Source of the numbers:* k8s.io/cri-api, pkg/apis/runtime/v1/api.proto.
mod wire {
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Metadata {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(string, tag = "2")]
        pub(super) uid: String,
        #[prost(string, tag = "3")]
        pub(super) namespace: String,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Namespaces {
        #[prost(int32, tag = "1")]
        pub(super) network: i32,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Security {
        #[prost(message, optional, tag = "1")]
        pub(super) namespaces: Option<Namespaces>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct LinuxPod {
        #[prost(message, optional, tag = "2")]
        pub(super) security: Option<Security>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Dns {
        #[prost(string, repeated, tag = "1")]
        pub(super) servers: Vec<String>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct PodConfig {
        #[prost(message, optional, tag = "1")]
        pub(super) metadata: Option<Metadata>,
        #[prost(message, optional, tag = "4")]
        pub(super) dns: Option<Dns>,
        #[prost(message, optional, tag = "8")]
        pub(super) linux: Option<LinuxPod>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct RunPod {
        #[prost(message, optional, tag = "1")]
        pub(super) config: Option<PodConfig>,
        #[prost(string, tag = "2")]
        pub(super) handler: String,
    }

    /// Also an answer that has but an id.
    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Id {
        #[prost(string, tag = "1")]
        pub(super) id: String,
    }

    /// Of an image, and of a container.
    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Name {
        #[prost(string, tag = "1")]
        pub(super) name: String,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct ImageStatus {
        #[prost(message, optional, tag = "1")]
        pub(super) image: Option<Name>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct ContainerConfig {
        #[prost(message, optional, tag = "1")]
        pub(super) metadata: Option<Name>,
        #[prost(message, optional, tag = "2")]
        pub(super) image: Option<Name>,
        #[prost(string, repeated, tag = "3")]
        pub(super) command: Vec<String>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct CreateContainer {
        #[prost(string, tag = "1")]
        pub(super) pod: String,
        #[prost(message, optional, tag = "2")]
        pub(super) config: Option<ContainerConfig>,
        #[prost(message, optional, tag = "3")]
        pub(super) pod_config: Option<PodConfig>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Exec {
        #[prost(string, tag = "1")]
        pub(super) container: String,
        #[prost(string, repeated, tag = "2")]
        pub(super) command: Vec<String>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Executed {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) stdout: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")]
        pub(super) stderr: Vec<u8>,
        #[prost(int32, tag = "3")]
        pub(super) code: i32,
    }
}

/// containerd as the kubelet calls it.
pub(crate) struct Cri {
    channel: Channel,
}

/// A pod on the machine's own network.
pub(crate) struct Pod {
    id: String,
    config: wire::PodConfig,
}

impl Cri {
    /// Waits until [`IMAGE`] is seen, which was imported: 1.6 looks at what others list a moment later.
    pub(crate) async fn connect(socket: &Path) -> Self {
        let cri = Self { channel: containerd_client::connect(socket).await.unwrap() };
        let asked = || wire::ImageStatus { image: Some(wire::Name { name: IMAGE.to_owned() }) };
        let is_seen = || {
            let told: wire::ImageStatus =
                Handle::current().block_on(cri.call("ImageService/ImageStatus", asked()))?;
            told.image.context("it is not seen")
        };
        block_in_place(|| testbed::wait_until(Duration::from_secs(60), IMAGE, is_seen)).unwrap();
        cri
    }

    async fn call<A: Message + Default + 'static>(
        &self,
        method: &str,
        asked: impl Message + Default + 'static,
    ) -> Result<A, Status> {
        let mut client = Grpc::new(self.channel.clone());
        client.ready().await.unwrap();
        let path = PathAndQuery::try_from(format!("/runtime.v1.{method}")).unwrap();
        let codec: ProstCodec<_, A> = ProstCodec::default();
        client.unary(Request::new(asked), path, codec).await.map(tonic::Response::into_inner)
    }

    /// Runs a pod of nothing but its own first container.
    pub(crate) async fn run_pod(&self, name: &str, handler: &str) -> Result<Pod, Status> {
        let (name, namespace) = (name.to_owned(), "default".to_owned());
        let security = wire::Security { namespaces: Some(wire::Namespaces { network: NODE }) };
        let config = wire::PodConfig {
            metadata: Some(wire::Metadata { uid: name.clone(), name, namespace }),
            // Else it takes over the machine's, which there may be none of.
            dns: Some(wire::Dns { servers: vec!["127.0.0.1".to_owned()] }),
            linux: Some(wire::LinuxPod { security: Some(security) }),
        };
        let asked = wire::RunPod { config: Some(config.clone()), handler: handler.to_owned() };
        let wire::Id { id } = self.call("RuntimeService/RunPodSandbox", asked).await?;
        Ok(Pod { id, config })
    }

    /// Starts a command in a container of the pod; the container's id.
    pub(crate) async fn start(&self, pod: &Pod, command: &[&str]) -> Result<String, Status> {
        let config = wire::ContainerConfig {
            metadata: Some(wire::Name { name: crate::harness::unique() }),
            image: Some(wire::Name { name: IMAGE.to_owned() }),
            command: command.iter().map(ToString::to_string).collect(),
        };
        let asked = wire::CreateContainer {
            pod: pod.id.clone(),
            config: Some(config),
            pod_config: Some(pod.config.clone()),
        };
        let container: wire::Id = self.call("RuntimeService/CreateContainer", asked).await?;
        let _: wire::Id = self.call("RuntimeService/StartContainer", container.clone()).await?;
        Ok(container.id)
    }

    /// Runs a command in a running container to its end, and gives what it has printed.
    pub(crate) async fn say(&self, container: &str, command: &[&str]) -> String {
        let command = command.iter().map(ToString::to_string).collect();
        let asked = wire::Exec { container: container.to_owned(), command };
        let executed: wire::Executed = self.call("RuntimeService/ExecSync", asked).await.unwrap();
        assert_eq!(executed.code, 0, "{executed:?}");
        String::from_utf8(executed.stdout).unwrap()
    }

    /// Ends a pod and its containers, and forgets it.
    pub(crate) async fn remove(&self, pod: Pod) {
        for method in ["RuntimeService/StopPodSandbox", "RuntimeService/RemovePodSandbox"] {
            let _: wire::Id = self.call(method, wire::Id { id: pod.id.clone() }).await.unwrap();
        }
    }
}
