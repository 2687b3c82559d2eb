//! A configured Tang server.

use std::fmt;
use std::str::FromStr;

use hyper::Uri;
use nodekeel_localstorage::tang::Thumbprint;

/// A Tang server, and the key by which the node knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TangServer {
    pub(crate) url: TangUrl,
    /// The key that signs its advertisements.
    pub(crate) signer: Thumbprint,
}

/// The URL of a Tang server: `http://HOST[:PORT][/PATH]`, without a slash at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TangUrl {
    text: String,
    uri: Uri,
}

impl TangUrl {
    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// The host without the brackets of an IPv6 address, and the port.
    pub(super) fn endpoint(&self) -> (&str, u16) {
        let host = self.uri.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        (host, self.uri.port_u16().unwrap_or(80))
    }

    /// Host and port, as the header of a request names them.
    pub(super) fn authority(&self) -> &str {
        self.uri.authority().map(|authority| authority.as_str()).unwrap_or_default()
    }

    /// The path of a request.
    pub(super) fn path_of(&self, path: &str) -> String {
        format!("{}{path}", self.uri.path().trim_end_matches('/'))
    }
}

impl FromStr for TangUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim_end_matches('/');
        let invalid = |why: &str| format!("{text:?} {why}; write http://HOST or http://HOST:PORT");
        let uri: Uri = text.parse().map_err(|_| invalid("is no URL"))?;
        let authority = uri.authority().map(|authority| authority.as_str()).unwrap_or_default();
        match uri.scheme_str() {
            // The exchange and the signature protect what is sent.
            Some("https") => return Err(invalid("has TLS, which the protocol of Tang does not need")),
            Some("http") if !authority.is_empty() => {}
            _ => return Err(invalid("is no URL of a server")),
        }
        // A port that is no number is parsed as an authority.
        if uri.query().is_some()
            || authority.contains('@')
            || (uri.port().is_none() && ends_with_port(authority))
        {
            return Err(invalid("has more than a host, a port and a path"));
        }
        Ok(Self { text: text.to_owned(), uri })
    }
}

fn ends_with_port(authority: &str) -> bool {
    !authority.ends_with(']') && authority.contains(':')
}

impl fmt::Display for TangUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_host_and_its_port() {
        for (text, host, port, path) in [
            ("http://tang", "tang", 80, "/adv"),
            ("http://tang:8080/", "tang", 8080, "/adv"),
            ("http://[fd00::1]:7500", "fd00::1", 7500, "/adv"),
            ("http://10.0.0.1/one/two/", "10.0.0.1", 80, "/one/two/adv"),
        ] {
            let url: TangUrl = text.parse().expect(text);
            assert_eq!((url.endpoint(), &*url.path_of("/adv")), ((host, port), path));
            assert_eq!(url.to_string(), text.trim_end_matches('/'));
        }
        for text in [
            "",
            "tang",
            "http://",
            "/adv",
            "https://tang",
            "ftp://tang",
            "http://a@tang",
            "http://tang?a",
            "http://tang:x",
        ] {
            assert!(text.parse::<TangUrl>().is_err(), "{text}");
        }
    }
}
