// Opens the report: reads the first block, shows the first tab, and draws the others when asked.

const TABS = [
  ['overview', 'Overview', overviewTab], ['curves', 'Curves', curvesTab], ['time', 'Time', timeTab], ['rewards', 'Rewards', rewardsTab],
  ['completions', 'Completions', completionsTab], ['recipe', 'Recipe', recipeTab], ['compare', 'Compare', compareTab],
];

// Takes the system's colours, dark or light, also when they change.
function followTheme() {
  const system = matchMedia('(prefers-color-scheme: dark)');
  const set = () => {
    document.documentElement.dataset.theme = system.matches ? 'dark' : 'light';
    redrawAll();
  };
  system.addEventListener('change', set);
  set();
}

function page() {
  const shown = TABS.filter(([key]) => key !== 'compare' || report.two);
  const panels = new Map();
  const tabs = shown.map(([key, title]) => h('button', {
    type: 'button', role: 'tab', id: `tab-${key}`, 'aria-controls': `panel-${key}`, 'data-tab': key, onclick: () => select_(key, true),
  }, title));
  const main = h('main', { id: 'page', tabindex: '-1' });
  for (const [key] of shown) {
    const panel = h('div', { role: 'tabpanel', id: `panel-${key}`, 'aria-labelledby': `tab-${key}`, hidden: true });
    panels.set(key, panel);
    main.append(panel);
  }
  const made = new Set();
  const make = (key) => {
    if (made.has(key)) return;
    made.add(key);
    panels.get(key).append(shown.find(([k]) => k === key)[2]());
  };
  const select_ = (key, isChosen) => {
    make(key);
    for (const tab of tabs) {
      const isOpen = tab.dataset.tab === key;
      tab.setAttribute('aria-selected', String(isOpen));
      panels.get(tab.dataset.tab).hidden = !isOpen;
      if (isOpen) tab.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    }
    if (isChosen) history.replaceState(null, '', `#${key}`);
  };
  const bar = h('div', { class: 'tabs', role: 'tablist', 'aria-label': 'Parts of the report' }, tabs);
  addEventListener('hashchange', () => { const key = location.hash.slice(1); if (panels.has(key)) select_(key, false); });
  const title = report.two ? report.runs.map((run, i) => h('span', { class: `run-name run-${i}` }, h('i', {}), run.label)) : report.runs[0].label;
  const written = new Date(1000 * report.head.written);
  const view = [
    h('header', { class: 'top' }, h('div', { class: 'top-row' },
      h('p', { class: 'brand' }, 'grpo', h('span', {}, 'report')), h('h1', {}, title)), bar),
    main,
    h('footer', { class: 'foot' }, `Written by grpo ${report.head.version} on ${written.toISOString().slice(0, 16).replace('T', ' ')} UTC. Curves drawn with uPlot (MIT licence).`),
  ];
  document.getElementById('app').replaceChildren(...view);
  const asked = location.hash.slice(1);
  select_(panels.has(asked) ? asked : 'overview', false);
}

async function open_() {
  report.head = await unpack('head');
  report.runs = report.head.runs;
  report.two = report.runs.length > 1;
  report.runs.forEach((run, i) => {
    const isTwice = report.two && report.runs[0].name === report.runs[1].name;
    run.label = isTwice ? run.folder : run.name;
    run.index = i;
  });
  followTheme();
  page();
  document.documentElement.dataset.opened = String(Math.round(performance.now()));
  // Unpacked while the first tab is read.
  setTimeout(() => report.runs.forEach((run, i) => completionsOf(i)), 50);
}

open_().catch((error) => {
  document.getElementById('app').replaceChildren(h('p', { class: 'loading error' },
    `The report cannot be opened: ${error.message}. It needs a browser of 2023 or newer.`));
  throw error;
});
