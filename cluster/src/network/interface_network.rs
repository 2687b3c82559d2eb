//! The address of a network interface, from the kernel.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{FutureExt as _, Stream, StreamExt as _, TryStreamExt as _};
use nodekeel_supervisor::{CanceledError, Context, Failure, RunFuture, Runnable};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::LinkFlags;
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
use thiserror::Error;
use tokio::sync::watch;

use super::{Network, NodeAddress};

/// The address of one interface, selected by the interface's name.
///
/// The interface is configured, not guessed: a host may have several links. Of several addresses it is the
/// first global IPv4 address, or the first global IPv6 address without an IPv4 address; tentative and
/// deprecated addresses are skipped. It configures nothing: that is up to a DHCP client, or the kernel's
/// command line.
///
/// The address is kept up to date while the [service](Self::watch_service) runs. Every kernel message about
/// links or addresses triggers a new query, so that a lost message only delays an update.
///
/// *Source:* rtnetlink(7).
#[derive(Clone, Debug)]
pub struct InterfaceNetwork(Arc<InterfaceState>);

#[derive(Debug)]
struct InterfaceState {
    interface: String,
    address: watch::Sender<Option<NodeAddress>>,
    no_address_reason: Mutex<Option<String>>,
}

/// The runnable that keeps an [`InterfaceNetwork`] up to date.
#[derive(Clone, Debug)]
pub struct InterfaceService(Arc<InterfaceState>);

#[derive(Debug, Error)]
enum InterfaceError {
    #[error("can't open a netlink socket to watch the node's address")]
    OpenSocket(#[source] io::Error),
    #[error("can't query the kernel for the addresses of {interface}")]
    Query { interface: String, source: rtnetlink::Error },
    #[error("the netlink socket that watches the node's address was closed")]
    SocketClosed,
}

impl InterfaceNetwork {
    /// The address of this interface.
    pub fn new(interface: impl Into<String>) -> Self {
        let interface = interface.into();
        let reason = Mutex::new(Some(format!("the address of {interface} was not queried yet")));
        Self(Arc::new(InterfaceState {
            interface,
            address: watch::Sender::new(None),
            no_address_reason: reason,
        }))
    }

    /// The runnable that the supervisor has to run.
    pub fn watch_service(&self) -> InterfaceService {
        InterfaceService(Arc::clone(&self.0))
    }
}

impl Network for InterfaceNetwork {
    fn watch_address(&self) -> watch::Receiver<Option<NodeAddress>> {
        self.0.address.subscribe()
    }

    fn no_address_reason(&self) -> Option<String> {
        self.0.no_address_reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Runnable for InterfaceService {
    fn run(&self, ctx: Context) -> RunFuture {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            let failed = tokio::select! {
                CanceledError = ctx.canceled() => return Err(CanceledError.into()),
                failed = shared.watch_interface(&ctx) => failed,
            };
            // The last address may have changed unnoticed, so it is withdrawn.
            shared.publish(None, Some(format!("the address watch of {} has ended", shared.interface)));
            failed
        })
    }
}

impl InterfaceState {
    async fn watch_interface(&self, ctx: &Context) -> Result<(), Failure> {
        // Subscribed before the first query: no change between the two is missed.
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, handle, messages) =
            new_multicast_connection(&groups).map_err(InterfaceError::OpenSocket)?;
        tokio::select! {
            () = connection => Err(InterfaceError::SocketClosed.into()),
            failed = self.refresh_on_messages(ctx, &handle, messages) => failed,
        }
    }

    /// Queries now, and again after each message, without reading it: messages may have been lost.
    async fn refresh_on_messages<M>(
        &self,
        ctx: &Context,
        handle: &Handle,
        mut messages: impl Stream<Item = M> + Unpin,
    ) -> Result<(), Failure> {
        let mut is_ready = false;
        loop {
            let (address, reason) = self.read_address(handle).await?;
            self.publish(address, reason);
            if !is_ready {
                ctx.signal_ready()?;
                is_ready = true;
            }
            if messages.next().await.is_none() {
                return Err(InterfaceError::SocketClosed.into());
            }
            // One query covers all messages that have arrived until then.
            while let Some(Some(_)) = messages.next().now_or_never() {}
        }
    }

    /// The address now, or why there is none.
    async fn read_address(
        &self,
        handle: &Handle,
    ) -> Result<(Option<NodeAddress>, Option<String>), InterfaceError> {
        let interface = &self.interface;
        let ask = |source| InterfaceError::Query { interface: interface.clone(), source };
        let link = match handle.link().get().match_name(interface.clone()).execute().try_next().await {
            Ok(Some(link)) => link,
            Ok(None) => return Ok((None, Some(format!("interface {interface} does not exist")))),
            // The kernel answers a query for a name that no interface has with `ENODEV`.
            Err(error) if is_device_missing(&error) => {
                return Ok((None, Some(format!("interface {interface} does not exist"))));
            }
            Err(source) => return Err(ask(source)),
        };
        if !link.header.flags.contains(LinkFlags::Up) {
            return Ok((None, Some(format!("interface {interface} is down"))));
        }
        let all = handle.address().get().set_link_index_filter(link.header.index).execute();
        let all: Vec<AddressMessage> = all.try_collect().await.map_err(ask)?;
        // `min_by_key` returns the first of several: IPv4 before IPv6, and else the kernel's order.
        let best = all.iter().filter_map(usable_address).min_by_key(|address| address.ip_addr().is_ipv6());
        let reason = || format!("interface {interface} is up, but has no global address");
        Ok((best, best.is_none().then(reason)))
    }

    fn publish(&self, address: Option<NodeAddress>, reason: Option<String>) {
        // The reason is stored before the address is sent: a watcher that wakes up finds the reason that
        // belongs to it.
        let before = {
            let mut last = self.no_address_reason.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *last, reason.clone())
        };
        // Watchers are also notified of another reason for the missing address, since they report it.
        if *self.address.borrow() == address && before == reason {
            return;
        }
        if let Some(reason) = reason {
            tracing::warn!(interface = %self.interface, "{reason}");
        }
        if let Some(address) = address {
            tracing::info!(interface = %self.interface, %address, "the node has an address");
        }
        self.address.send_replace(address);
    }
}

/// The address in a message, if other nodes can reach this one there.
fn usable_address(message: &AddressMessage) -> Option<NodeAddress> {
    let unusable = AddressHeaderFlags::Tentative | AddressHeaderFlags::Deprecated;
    let is_global = message.header.scope == AddressScope::Universe;
    let is_ip = matches!(message.header.family, AddressFamily::Inet | AddressFamily::Inet6);
    if !is_global || !is_ip || message.header.flags.intersects(unusable) {
        return None;
    }
    // For a point-to-point link, `Address` is that of the other end.
    let of = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
    let local = of(|attribute| if let AddressAttribute::Local(ip) = attribute { Some(*ip) } else { None });
    let plain =
        || of(|attribute| if let AddressAttribute::Address(ip) = attribute { Some(*ip) } else { None });
    NodeAddress::try_new(local.or_else(plain)?).ok()
}

fn is_device_missing(error: &rtnetlink::Error) -> bool {
    let rtnetlink::Error::NetlinkError(message) = error else { return false };
    message.raw_code() == -rustix::io::Errno::NODEV.raw_os_error()
}
