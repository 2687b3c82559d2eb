//! The address of a network interface, as the kernel tells it.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{FutureExt as _, Stream, StreamExt as _, TryStreamExt as _};
use nodekeel_supervisor::{Cancelled, Context, Failure, RunFuture, Runnable};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::LinkFlags;
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
use thiserror::Error;
use tokio::sync::watch;

use super::{Address, Network};

/// The address of one interface, by the interface's name.
///
/// Which interface is said, and not guessed: a machine may have several links. Of several addresses it is the first
/// global one of IPv4, and only where there is none, of IPv6; tentative and deprecated ones don't count. Nothing is
/// configured here: that is for whoever runs DHCP, or the kernel's command line.
///
/// It finds out while its [service](Self::service) runs. Whatever the kernel tells of links and addresses makes it look
/// again, so that a message that was lost costs nothing but time.
///
/// *Source:* rtnetlink(7).
#[derive(Clone, Debug)]
pub struct InterfaceNetwork(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    interface: String,
    address: watch::Sender<Option<Address>>,
    trouble: Mutex<Option<String>>,
}

/// What keeps an [`InterfaceNetwork`] up to date.
#[derive(Clone, Debug)]
pub struct InterfaceService(Arc<Shared>);

#[derive(Debug, Error)]
enum InterfaceError {
    #[error("open a netlink socket")]
    Open(#[source] io::Error),
    #[error("ask the kernel for the addresses of {interface}")]
    Ask { interface: String, source: rtnetlink::Error },
    #[error("the netlink socket was closed")]
    Closed,
}

impl InterfaceNetwork {
    /// Of this interface.
    pub fn new(interface: impl Into<String>) -> Self {
        let interface = interface.into();
        let trouble = Mutex::new(Some(format!("nobody has looked for the address of {interface} yet")));
        Self(Arc::new(Shared { interface, address: watch::Sender::new(None), trouble }))
    }

    /// What the tree has to run.
    pub fn service(&self) -> InterfaceService {
        InterfaceService(Arc::clone(&self.0))
    }
}

impl Network for InterfaceNetwork {
    fn address(&self) -> watch::Receiver<Option<Address>> {
        self.0.address.subscribe()
    }

    fn trouble(&self) -> Option<String> {
        self.0.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Runnable for InterfaceService {
    fn run(&self, ctx: Context) -> RunFuture {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            let failed = tokio::select! {
                Cancelled = ctx.cancelled() => return Err(Cancelled.into()),
                failed = shared.follow(&ctx) => failed,
            };
            shared.tell(None, Some(format!("looking for the address of {} has ended", shared.interface)));
            failed
        })
    }
}

impl Shared {
    async fn follow(&self, ctx: &Context) -> Result<(), Failure> {
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, handle, messages) =
            new_multicast_connection(&groups).map_err(InterfaceError::Open)?;
        tokio::select! {
            () = connection => Err(InterfaceError::Closed.into()),
            failed = self.look_whenever(ctx, &handle, messages) => failed,
        }
    }

    /// Looks now, and again after each message, whatever it says: some may have been lost.
    async fn look_whenever<M>(
        &self,
        ctx: &Context,
        handle: &Handle,
        mut messages: impl Stream<Item = M> + Unpin,
    ) -> Result<(), Failure> {
        let mut is_ready = false;
        loop {
            let (address, trouble) = self.look(handle).await?;
            self.tell(address, trouble);
            if !is_ready {
                ctx.ready()?;
                is_ready = true;
            }
            if messages.next().await.is_none() {
                return Err(InterfaceError::Closed.into());
            }
            // Those that have come meanwhile are answered by the same look.
            while let Some(Some(_)) = messages.next().now_or_never() {}
        }
    }

    /// The address now, or why there is none.
    async fn look(&self, handle: &Handle) -> Result<(Option<Address>, Option<String>), InterfaceError> {
        let interface = &self.interface;
        let ask = |source| InterfaceError::Ask { interface: interface.clone(), source };
        let link = match handle.link().get().match_name(interface.clone()).execute().try_next().await {
            Ok(Some(link)) => link,
            Ok(None) => return Ok((None, Some(format!("there is no interface {interface}")))),
            Err(error) if is_no_device(&error) => {
                return Ok((None, Some(format!("there is no interface {interface}"))));
            }
            Err(source) => return Err(ask(source)),
        };
        if !link.header.flags.contains(LinkFlags::Up) {
            return Ok((None, Some(format!("interface {interface} is down"))));
        }
        let all = handle.address().get().set_link_index_filter(link.header.index).execute();
        let all: Vec<AddressMessage> = all.try_collect().await.map_err(ask)?;
        let best = all.iter().filter_map(usable).min_by_key(|address| address.ip().is_ipv6());
        let trouble = || format!("interface {interface} is up and has no address that others could reach");
        Ok((best, best.is_none().then(trouble)))
    }

    fn tell(&self, address: Option<Address>, trouble: Option<String>) {
        let before = {
            let mut last = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *last, trouble.clone())
        };
        // Another reason why there is none is told as well: whoever waits says it on.
        if *self.address.borrow() == address && before == trouble {
            return;
        }
        if let Some(trouble) = trouble {
            tracing::warn!(interface = %self.interface, "{trouble}");
        }
        if let Some(address) = address {
            tracing::info!(interface = %self.interface, %address, "this node has an address");
        }
        self.address.send_replace(address);
    }
}

/// The address of a message, if others can reach a node there.
fn usable(message: &AddressMessage) -> Option<Address> {
    let unusable = AddressHeaderFlags::Tentative | AddressHeaderFlags::Deprecated;
    let is_global = message.header.scope == AddressScope::Universe;
    let is_ip = matches!(message.header.family, AddressFamily::Inet | AddressFamily::Inet6);
    if !is_global || !is_ip || message.header.flags.intersects(unusable) {
        return None;
    }
    // Of a point-to-point link, `Address` is the other end's.
    let of = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
    let local = of(|attribute| if let AddressAttribute::Local(ip) = attribute { Some(*ip) } else { None });
    let plain =
        || of(|attribute| if let AddressAttribute::Address(ip) = attribute { Some(*ip) } else { None });
    Address::try_new(local.or_else(plain)?).ok()
}

fn is_no_device(error: &rtnetlink::Error) -> bool {
    let rtnetlink::Error::NetlinkError(message) = error else { return false };
    message.raw_code() == -rustix::io::Errno::NODEV.raw_os_error()
}
