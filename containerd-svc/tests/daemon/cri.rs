//! The part of the CRI that runs a container of a pod.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use prost::Message;
use tokio::runtime::Handle;
use tokio::task::block_in_place;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// The image of [`test_image`](crate::harness::pod_image), of pod sandboxes and containers.
pub(crate) const POD_IMAGE: &str = "localhost/pod:1";

/// Far more than a command takes in a guest beside other work.
const EXEC_TIMEOUT: Duration = Duration::from_secs(300);

/// *Source:* `NamespaceMode.NODE`: needs no CNI plugin.
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

    /// Also a response with only an id.
    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Id {
        #[prost(string, tag = "1")]
        pub(super) id: String,
    }

    /// The name of an image or a container.
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

/// A CRI client, as the kubelet is one.
pub(crate) struct CriClient {
    channel: Channel,
}

/// A pod on the host network.
pub(crate) struct Pod {
    id: String,
    config: wire::PodConfig,
}

impl CriClient {
    /// Waits until [`POD_IMAGE`] is seen, the imported image: the CRI of 1.6 lists images of other clients
    /// with a delay.
    pub(crate) async fn connect(socket: &Path) -> Self {
        let cri = Self { channel: containerd_client::connect(socket).await.unwrap() };
        let request = || wire::ImageStatus { image: Some(wire::Name { name: POD_IMAGE.to_owned() }) };
        let is_seen = || {
            let status: wire::ImageStatus =
                Handle::current().block_on(cri.call("ImageService/ImageStatus", request()))?;
            status.image.context("image not found")
        };
        block_in_place(|| testbed::wait_until(Duration::from_secs(60), POD_IMAGE, is_seen)).unwrap();
        cri
    }

    /// Returns whether the CRI knows an image by this name, as a kubelet asks before it pulls.
    pub(crate) async fn knows_image(&self, name: &str) -> bool {
        let request = wire::ImageStatus { image: Some(wire::Name { name: name.to_owned() }) };
        let status: wire::ImageStatus = self.call("ImageService/ImageStatus", request).await.unwrap();
        status.image.is_some()
    }

    /// Pulls an image from its registry; returns the id of the image.
    pub(crate) async fn pull_image(&self, name: &str) -> Result<String, Status> {
        let request = wire::ImageStatus { image: Some(wire::Name { name: name.to_owned() }) };
        let wire::Id { id } = self.call("ImageService/PullImage", request).await?;
        Ok(id)
    }

    /// Removes an image, as `crictl rmi` does.
    pub(crate) async fn remove_image(&self, name: &str) {
        let request = wire::ImageStatus { image: Some(wire::Name { name: name.to_owned() }) };
        let _: wire::ImageStatus = self.call("ImageService/RemoveImage", request).await.unwrap();
    }

    async fn call<A: Message + Default + 'static>(
        &self,
        method: &str,
        request: impl Message + Default + 'static,
    ) -> Result<A, Status> {
        let mut client = Grpc::new(self.channel.clone());
        client.ready().await.unwrap();
        let path = PathAndQuery::try_from(format!("/runtime.v1.{method}")).unwrap();
        let codec: ProstCodec<_, A> = ProstCodec::default();
        client.unary(Request::new(request), path, codec).await.map(tonic::Response::into_inner)
    }

    /// Runs a pod with only its sandbox container.
    pub(crate) async fn run_pod(&self, name: &str, handler: &str) -> Result<Pod, Status> {
        let (name, namespace) = (name.to_owned(), "default".to_owned());
        let security = wire::Security { namespaces: Some(wire::Namespaces { network: NODE }) };
        let config = wire::PodConfig {
            metadata: Some(wire::Metadata { uid: name.clone(), name, namespace }),
            // The default copies the host's resolv.conf, which may not exist.
            dns: Some(wire::Dns { servers: vec!["127.0.0.1".to_owned()] }),
            linux: Some(wire::LinuxPod { security: Some(security) }),
        };
        let request = wire::RunPod { config: Some(config.clone()), handler: handler.to_owned() };
        let wire::Id { id } = self.call("RuntimeService/RunPodSandbox", request).await?;
        Ok(Pod { id, config })
    }

    /// Starts a command in a container of the pod; returns the container's id.
    pub(crate) async fn start_container(&self, pod: &Pod, command: &[&str]) -> Result<String, Status> {
        let config = wire::ContainerConfig {
            metadata: Some(wire::Name { name: crate::harness::unique_name() }),
            image: Some(wire::Name { name: POD_IMAGE.to_owned() }),
            command: command.iter().map(ToString::to_string).collect(),
        };
        let request = wire::CreateContainer {
            pod: pod.id.clone(),
            config: Some(config),
            pod_config: Some(pod.config.clone()),
        };
        let container: wire::Id = self.call("RuntimeService/CreateContainer", request).await?;
        let _: wire::Id = self.call("RuntimeService/StartContainer", container.clone()).await?;
        Ok(container.id)
    }

    /// Runs a command without effects in a running container and returns its output. containerd gives a shim two
    /// seconds to report the state of a container, less than gVisor's takes on a busy machine: it is run again.
    pub(crate) async fn exec_sync(&self, container: &str, command: &[&str]) -> String {
        let command = command.iter().map(ToString::to_string).collect();
        let request = wire::Exec { container: container.to_owned(), command };
        let answered = async {
            loop {
                match self.call::<wire::Executed>("RuntimeService/ExecSync", request.clone()).await {
                    Err(status) if status.code() == Code::DeadlineExceeded => println!("again: {status}"),
                    answer => return answer.unwrap(),
                }
            }
        };
        let executed = timeout(EXEC_TIMEOUT, answered).await.expect("the command was run");
        assert_eq!(executed.code, 0, "{executed:?}");
        String::from_utf8(executed.stdout).unwrap()
    }

    /// Stops a pod and its containers, and removes it.
    pub(crate) async fn remove_pod(&self, pod: Pod) {
        for method in ["RuntimeService/StopPodSandbox", "RuntimeService/RemovePodSandbox"] {
            let _: wire::Id = self.call(method, wire::Id { id: pod.id.clone() }).await.unwrap();
        }
    }
}
