// An app of React Native, in the folder APP.
const { join } = require("node:path");

const modules = join(__dirname, "node_modules");
module.exports = {
  projectRoot: process.env.APP,
  watchFolders: [modules],
  resolver: { useWatchman: false, nodeModulesPaths: [modules] },
  transformer: { babelTransformerPath: require.resolve("@react-native/metro-babel-transformer") },
};
