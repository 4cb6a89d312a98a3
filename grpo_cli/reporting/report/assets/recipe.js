// The tab of the recipe: differences from the shipped one, and from the defaults.

function recipeTab() {
  return h('div', { class: 'stack' }, report.two ? recipeDifference() : null, report.runs.map((run) => [
    run.changes.shipped && card(report.two ? `Changed in the shipped recipe: ${run.label}` : `Changed in the shipped recipe ${run.recipe}`,
      run.changes.shipped.length ? knobs(run.changes.shipped, 'shipped', 'this run') : h('p', { class: 'note' }, 'Nothing: the recipe was run as it is shipped.')),
    card(report.two ? `Different from the defaults: ${run.label}` : 'Different from the defaults', knobs(run.changes.defaults, 'default', 'this run')),
  ]));
}

function knobs(changes, old, now) {
  return grid([{ title: 'knob' }, { title: old }, { title: now }, { title: '' }],
    changes.map((c) => [h('code', {}, c.key), h('span', { class: 'value was' }, c.old), h('span', { class: 'value' }, c.new), h('span', { class: 'doc' }, c.doc)]), `Knobs: ${old} and ${now}`);
}

function recipeDifference() {
  const found = report.head.compared?.recipe || [];
  const [a, b] = report.runs;
  return card('Knobs in which the runs differ', found.length ? knobs(found, a.label, b.label) : h('p', { class: 'note' }, 'None: both have the same recipe.'));
}
