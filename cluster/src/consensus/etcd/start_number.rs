//! How often a member has started, as its URL for clients says it.

const START_PARAMETER: &str = "?start=";

/// How often a member has started; 0 for one that has not, or that no release with this count has started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StartNumber(pub(super) u64);

impl StartNumber {
    /// The URL with this number.
    pub(super) fn mark_url(self, url: &str) -> String {
        format!("{url}{START_PARAMETER}{}", self.0)
    }

    /// The number in the URLs of a listed member.
    pub(super) fn from_urls(urls: &[String]) -> StartNumber {
        let parse = |url: &String| url.split_once(START_PARAMETER)?.1.parse().ok();
        StartNumber(urls.iter().filter_map(parse).max().unwrap_or_default())
    }
}
