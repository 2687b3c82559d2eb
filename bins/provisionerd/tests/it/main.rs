//! provisionerd as its user sees it.

mod words;
