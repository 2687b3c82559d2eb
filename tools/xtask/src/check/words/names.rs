//! Counting the names of types and functions.

use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, ItemFn, ItemImpl, ItemMod, ItemTrait, Meta, Visibility};

/// How many names are one word, of how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameShare {
    one_word: usize,
    all: usize,
}

impl NameShare {
    fn add(&mut self, is_one_word: bool) {
        self.one_word += usize::from(is_one_word);
        self.all += 1;
    }

    /// In percent; 0 where there are none.
    pub(crate) fn share(self) -> f64 {
        if self.all == 0 { 0.0 } else { 100.0 * self.one_word as f64 / self.all as f64 }
    }

    fn plus(self, other: Self) -> Self {
        Self { one_word: self.one_word + other.one_word, all: self.all + other.all }
    }
}

/// The public names of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameCounts {
    /// Structs, enums, unions, traits and aliases.
    pub(crate) types: NameShare,
    /// Functions, methods, and the methods of public traits.
    pub(crate) functions: NameShare,
}

impl NameCounts {
    /// The sum of both.
    pub(crate) fn plus(self, other: &Self) -> Self {
        Self { types: self.types.plus(other.types), functions: self.functions.plus(other.functions) }
    }

    /// A row of the table.
    pub(crate) fn row(&self, member: &str) -> [String; 7] {
        let [types, functions] = [self.types, self.functions].map(|names| {
            [names.one_word.to_string(), names.all.to_string(), format!("{:.0}", names.share())]
        });
        let [a, b, c] = types;
        let [d, e, f] = functions;
        [member.to_owned(), a, b, c, d, e, f]
    }
}

/// Adds the file's public names to `counts`, and gives the names of all its types.
pub(crate) fn count(file: &syn::File, counts: &mut NameCounts) -> Vec<String> {
    let mut visitor = NameVisitor { counts, types: Vec::new() };
    visitor.visit_file(file);
    visitor.types
}

struct NameVisitor<'a> {
    counts: &'a mut NameCounts,
    types: Vec<String>,
}

impl NameVisitor<'_> {
    fn add_type(&mut self, visibility: &Visibility, name: &syn::Ident) {
        let name = name.to_string();
        if is_public(visibility) {
            self.counts.types.add(type_words(&name) <= 1);
        }
        self.types.push(name);
    }

    fn add_function(&mut self, name: &syn::Ident) {
        self.counts.functions.add(!name.to_string().trim_matches('_').contains('_'));
    }
}

impl<'ast> Visit<'ast> for NameVisitor<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add_type(&item.vis, &item.ident);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add_type(&item.vis, &item.ident);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add_type(&item.vis, &item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add_type(&item.vis, &item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        self.add_type(&item.vis, &item.ident);
        if is_public(&item.vis) {
            for member in &item.items {
                if let syn::TraitItem::Fn(function) = member {
                    self.add_function(&function.sig.ident);
                }
            }
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        // The names of a trait's methods are the trait's.
        if item.trait_.is_none() && !is_test(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if is_public(&item.vis) && !is_test(&item.attrs) {
            self.add_function(&item.sig.ident);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if is_public(&item.vis) && !is_test(&item.attrs) {
            self.add_function(&item.sig.ident);
        }
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Whether the item is a test, or compiled for tests alone.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        Meta::NameValue(_) => false,
    })
}

/// `Dn` is one word, `DirStore` two, `TLSKey` two.
fn type_words(name: &str) -> usize {
    let letters: Vec<char> = name.chars().collect();
    let starts = |i: &usize| {
        let is_upper = letters[*i].is_uppercase();
        let after_lower = *i == 0 || !letters[i - 1].is_uppercase();
        let before_lower = letters.get(i + 1).is_some_and(|next| next.is_lowercase());
        is_upper && (after_lower || before_lower)
    };
    (0..letters.len()).filter(starts).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_type_start_with_a_capital() {
        let words = ["Dn", "DirStore", "TLSKey", "Sha256", "EtcdV3Client"].map(type_words);
        assert_eq!(words, [1, 2, 2, 1, 3]);
    }

    #[test]
    fn public_names_are_counted_and_methods_of_foreign_traits_are_not() {
        let file = syn::parse_str(
            "pub struct Dn; struct Ring; pub trait Store { fn put(&self); fn read_all(&self); }
             impl Dn { pub fn new() {} pub(crate) fn hidden() {} fn private() {} }
             impl Store for Dn { fn put(&self) {} fn read_all(&self) {} }
             #[cfg(test)] mod tests { pub fn helper() {} }",
        );
        let mut counts = NameCounts::default();
        assert_eq!(count(&file.unwrap(), &mut counts), ["Dn", "Ring", "Store"]);
        assert_eq!(counts.types, NameShare { one_word: 2, all: 2 });
        assert_eq!(counts.functions, NameShare { one_word: 2, all: 3 });
    }
}
